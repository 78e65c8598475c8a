"""Who the clients are: data sets, and how their training data are spread over the clients."""

from datamodules.cifar10 import CIFAR10
from datamodules.cityscapes import Cityscapes
from datamodules.client import InMemoryClient
from datamodules.digits import Digits
from datamodules.gaussians import Gaussians
from datamodules.hugging_face import HuggingFaceImages
from datamodules.image_files import ImageFiles
from datamodules.image_folder import ImageDomains, ImageFolder
from datamodules.images import ImageData
from datamodules.in_memory import InMemoryDataModule
from datamodules.leaf import FEMNIST
from datamodules.partition_file import FromFile
from datamodules.partitioned import PartitionedDataModule
from datamodules.partitions import (
    IID,
    Dirichlet,
    GammaSimilarity,
    HonestOnly,
    Natural,
    Partition,
    Shards,
)
from datamodules.streamed_images import ImageNet, StreamedImages
from datamodules.tiny_imagenet import TinyImageNet
from datamodules.torchvision_images import CIFAR100, FashionMNIST, TorchvisionImages

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "FEMNIST",
    "IID",
    "Cityscapes",
    "Digits",
    "Dirichlet",
    "FashionMNIST",
    "FromFile",
    "GammaSimilarity",
    "Gaussians",
    "HonestOnly",
    "HuggingFaceImages",
    "ImageData",
    "ImageDomains",
    "ImageFiles",
    "ImageFolder",
    "ImageNet",
    "InMemoryClient",
    "InMemoryDataModule",
    "Natural",
    "Partition",
    "PartitionedDataModule",
    "Shards",
    "StreamedImages",
    "TinyImageNet",
    "TorchvisionImages",
]
