"""Data sets, and partitions that spread their training samples over the clients."""

from fl_lightning.datamodules.cityscapes import Cityscapes
from fl_lightning.datamodules.digits import Digits
from fl_lightning.datamodules.dirichlet import Dirichlet, ExtendedDirichlet
from fl_lightning.datamodules.gaussians import Gaussians
from fl_lightning.datamodules.hugging_face import HuggingFaceImages
from fl_lightning.datamodules.image_files import ImageFiles
from fl_lightning.datamodules.image_folders import ImageDomains, ImageFolder
from fl_lightning.datamodules.images import ImageData
from fl_lightning.datamodules.in_memory import InMemoryClient, InMemoryDataModule, InMemorySamples
from fl_lightning.datamodules.leaf import FEMNIST
from fl_lightning.datamodules.partition_file import FromFile
from fl_lightning.datamodules.partitioned_data import PartitionedDataModule
from fl_lightning.datamodules.partitions import IID, GammaSimilarity, HonestOnly, Natural, Partition
from fl_lightning.datamodules.shards import Shards
from fl_lightning.datamodules.streamed_images import ImageNet, StreamedImages
from fl_lightning.datamodules.tensors import ScikitLearn, TensorData
from fl_lightning.datamodules.tiny_imagenet import TinyImageNet
from fl_lightning.datamodules.torchvision_images import CIFAR10, CIFAR100, FashionMNIST, TorchvisionImages

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "FEMNIST",
    "IID",
    "Cityscapes",
    "Digits",
    "Dirichlet",
    "ExtendedDirichlet",
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
    "InMemorySamples",
    "Natural",
    "Partition",
    "PartitionedDataModule",
    "ScikitLearn",
    "Shards",
    "StreamedImages",
    "TensorData",
    "TinyImageNet",
    "TorchvisionImages",
]
