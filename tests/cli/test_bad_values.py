"""Values that a setting does not take: each is one line, compared as a whole, and nothing is left behind."""

import math
import re
from pathlib import Path

import pytest

from tests.support.command_line import message_of, run, write_config

INF = math.inf
DATA = (
    "there are CIFAR10, CIFAR100, Cityscapes, Digits, FEMNIST, FashionMNIST, Gaussians, HuggingFaceImages, "
    "ImageDomains, ImageFolder, ImageNet, ScikitLearn, StreamedImages, TensorData, TinyImageNet, TorchvisionImages"
)
ATTACKS = (
    "there are ALittleIsEnough, Backdoor, FallOfEmpires, Gaussian, GradientAscent, LabelFlip, Mimic, "
    "ModelReplacement, NonFinite, Scaled, SignFlip"
)


def byzantine(**settings):
    return {"class_path": "Byzantine", "init_args": {"attack": "SignFlip", "clients": 1, **settings}}


# (arguments or changes of the YAML, the line)
TABLE = [
    ("--model.local_steps 1.5", "model.local_steps: 1.5 is not valid; it takes int, null"),
    ("--model.local_steps 0", "local_steps: 0 must be at least 1"),
    ("--model.local_steps -1", "local_steps: -1 must be at least 1"),
    ("--model.local_steps true", "model.local_steps: true is not valid; it takes int, null"),
    ("--model.local_steps []", "model.local_steps: [] is not valid; it takes int, null"),
    ("--model.local_steps {}", "model.local_steps: {} is not valid; it takes int, null"),
    ("--model.local_epochs 0", "local_steps: 2 and local_epochs: 0; give one of them, and leave the other out (null in YAML)"),
    ("--model.local_steps null --model.local_epochs 0", "local_epochs: 0 must be at least 1"),
    ("--model.local_steps null --model.local_epochs x", "model.local_epochs: x is not valid; it takes int, null"),
    ("--model.participation x", "model.participation: x is not valid; it takes int, float"),
    ("--model.participation true", "model.participation: true is not valid; it takes int, float"),
    ("--model.participation []", "model.participation: [] is not valid; it takes int, float"),
    ("--model.participation 4", "participation: 4 clients a round, but there are only 3; use at most that many or a fraction such as 0.1"),
    ("--model.weighting 3", "model.weighting: 3 is not valid; it takes ['examples', 'uniform', 'samples']"),
    ("--model.weighting none", "model.weighting: none is not valid; it takes ['examples', 'uniform', 'samples']"),
    ("--model.weighting null", "model.weighting: null is not valid; it takes ['examples', 'uniform', 'samples']"),
    ("--model.bn_momentum 0", "bn_momentum: 0.0 must be above 0 and at most 1; torch's default is 0.1"),
    ("--model.bn_momentum 2", "bn_momentum: 2.0 must be above 0 and at most 1; torch's default is 0.1"),
    ("--model.bn_momentum x", "model.bn_momentum: x is not valid; it takes float, null"),
    ("--model.bn_momentum -0.1", "bn_momentum: -0.1 must be above 0 and at most 1; torch's default is 0.1"),
    ("--model.budget_epochs 0", "budget_epochs: 0.0 must be positive and finite"),
    ("--model.budget_epochs -1", "budget_epochs: -1.0 must be positive and finite"),
    ("--model.budget_epochs nan", "model.budget_epochs: nan is not valid; it takes float, null"),
    ("--model.budget_epochs x", "model.budget_epochs: x is not valid; it takes float, null"),
    ("--model.budget_epochs 1e400", "budget_epochs: inf must be positive and finite"),
    ("--model.on_divergence ignore", "model.on_divergence: ignore is not valid; it takes ['error', 'record', 'drop']"),
    ("--model.centralised 2", "model.centralised: 2 is not valid; it takes bool"),
    ("--model.centralised maybe", "model.centralised: maybe is not valid; it takes bool"),
    ("--model.tf32 2", "model.tf32: 2 is not valid; it takes bool"),
    ("--model.parameter_groups 3", "model.parameter_groups: 3 is not valid; it takes dict[str, dict[str, float]], null"),
    ("--model.parameter_groups {bias:3}", "model.parameter_groups: {bias:3} is not valid; it takes dict[str, dict[str, float]], null"),
    ("--model.parameter_groups {bias:{lrr:0.1}}", "model.parameter_groups: {bias:{lrr:0.1}} is not valid; it takes dict[str, dict[str, float]], null"),
    ("--model.parameter_groups {bias:{lr:-1}}", "model.parameter_groups: {bias:{lr:-1}} is not valid; it takes dict[str, dict[str, float]], null"),
    ("--model.parameter_groups {bias:{lr_scale:-1}}", "model.parameter_groups: {bias:{lr_scale:-1}} is not valid; it takes dict[str, dict[str, float]], null"),
    ("--model.client_lr_schedule abc", "model.client_lr_schedule: there is no class 'abc'; there are InverseSteps, MultiStep"),
    ("--model.client_lr_schedule 3", "model.client_lr_schedule: there is no class '3'; there are InverseSteps, MultiStep"),
    ("--model.client_lr_schedule LeNet", "model.client_lr_schedule: the class 'LeNet' is of another kind; there are InverseSteps, MultiStep"),
    ("--model.client_lr_schedule MultiStep", "MultiStep: the following arguments are required: milestones"),
    ("--model.client_lr_schedule InverseSteps", "InverseSteps: the following arguments are required: period"),
    ("--model.executor Vector", "model.executor: there is no class 'Vector'; did you mean VectorizedExecutor?"),
    ("--model.executor 3", "model.executor: there is no class '3'; there are GraphExecutor, SequentialExecutor, VectorizedExecutor"),
    ("--model.executor VectorizedExecutor --model.executor.block_size 0", "VectorizedExecutor.block_size: 0 must be at least 1 (or null for all)"),
    ("--model.executor.compile true", "model.executor.compile: model.executor is null; give its class first, --model.executor CLASS (GraphExecutor, SequentialExecutor, VectorizedExecutor)"),
    ("--model.client_lr_schedule.period 3", "model.client_lr_schedule.period: model.client_lr_schedule is null; give its class first, --model.client_lr_schedule CLASS (InverseSteps, MultiStep)"),
    ("--model.aggregator Medium", "model.aggregator: there is no class 'Medium'; did you mean Median?"),
    ("--model.aggregator 3", "model.aggregator: there is no class '3'; there are CenteredClipping, CoordinateRule, GeometricMedian, Krum, MeanAroundMedian, Median, MixingRule, MultiKrum, RobustAggregator, TrimmedMean, WeightedMean"),
    ("--model.aggregator TrimmedMean --model.aggregator.fraction 0.7", "TrimmedMean: there is no setting 'fraction' among f, pre, per, weighting, max_weight"),
    ("--model.aggregator Krum --model.aggregator.byzantine 9", "Krum: there is no setting 'byzantine' among f, pre, per, score"),
    ("--model.client_optimizer 3", "model.client_optimizer: there is no class '3'; give one that this setting takes, or the dotted path of your own"),
    ("--model.client_optimizer Adm", "model.client_optimizer: there is no class 'Adm'; did you mean Adam or RAdam or NAdam?"),
    ("--model.client_optimizer LeNet", "model.client_optimizer: the class 'LeNet' is of another kind; give one that this setting takes, or the dotted path of your own"),
    ("--model.client_optimizer SGD,Adam", "model.client_optimizer: there is no class 'SGD,Adam'; give one class, or for a list [SGD,Adam]"),
    ("--model.client_optimizer.lr abc", "SGD.lr: abc is not valid; it takes float, Tensor"),
    ("--model {'local_steps':'x'}", "model.local_steps: x is not valid; it takes int, null"),
    ("--model.parameter_groups.bias.lr x", "model.parameter_groups.bias.lr: x is not valid; it takes dict[str, dict[str, float]], null"),
    ("--model.executor.init_args.compile true", "model.executor.compile: model.executor is null; give its class first, --model.executor CLASS (GraphExecutor, SequentialExecutor, VectorizedExecutor)"),
    ("--model.executor {'init_args':{'compile':true}}", "model.executor: {'init_args':{'compile':true}} is not valid; there are GraphExecutor, SequentialExecutor, VectorizedExecutor"),
    ("--model.metrics {'a':3}", "model.metrics: {'a':3} is not valid; give one that this setting takes, or the dotted path of your own"),
    ("--model.client_optimizer.lr abc --model.server_optimizer SGD --model.server_optimizer.lr 0.1", "SGD.lr: abc is not valid; it takes float, Tensor"),
    ("--model.client_optimizer.lr nan", "SGD.lr: nan is not valid; it takes float, Tensor"),
    ("--model.client_optimizer.momentum 1.5", "client_optimizer: SGD.momentum: 1.5 must lie in [0, 1]; use SGD, Adam, AdamW, RMSprop or Adagrad with settings that they take"),
    ("--model.client_optimizer.nesterov 3", "SGD.nesterov: 3 is not valid; it takes bool"),
    ("--model.client_optimizer Adam --model.client_optimizer.lr abc", "Adam.lr: abc is not valid; it takes float, Tensor"),
    ("--model.server_optimizer 3", "model.server_optimizer: there is no class '3'; give one that this setting takes, or the dotted path of your own"),
    ("--model.server_optimizer Adm", "model.server_optimizer: there is no class 'Adm'; did you mean Adam or RAdam or NAdam?"),
    ("--model.server_optimizer SGD --model.server_optimizer.lr x", "SGD.lr: x is not valid; it takes float, Tensor"),
    ("--model.server_optimizer SGD --model.server_optimizer.momentum 2", "server_optimizer: SGD.momentum: 2.0 must lie in [0, 1]; use SGD(lr=1), which is FedAvg, or SGD, Adam or Adagrad with other settings"),
    ("--model.server_optimizer FedAdam --model.server_optimizer.tau 0", "server_optimizer: FedAdam.tau: 0.0 must be above 0; use SGD(lr=1), which is FedAvg, or SGD, Adam or Adagrad with other settings"),
    ("--model.server_optimizer FedYogi --model.server_optimizer.lr -1", "server_optimizer: FedYogi.lr: -1.0 must be at least 0; use SGD(lr=1), which is FedAvg, or SGD, Adam or Adagrad with other settings"),
    ("--model.loss 3", "model.loss: there is no class '3'; give one that this setting takes, or the dotted path of your own"),
    ("--model.loss CrossEntropy", "model.loss: there is no class 'CrossEntropy'; did you mean CrossEntropyLoss?"),
    ("--model.loss Median", "model.loss: the class 'Median' is of another kind; give one that this setting takes, or the dotted path of your own"),
    ("--model.model 3", "model.model: there is no class '3'; give one that this setting takes, or the dotted path of your own"),
    ("--model.model LeNet,ResNet", "model.model: there is no class 'LeNet,ResNet'; give one class, or for a list [LeNet,ResNet]"),
    ("--model.model torchvision.models.ResNett", "model.model: class 'torchvision.models.ResNett' cannot be imported: module 'torchvision.models' has no attribute 'ResNett'; did you mean ResNet or RegNet or DenseNet?"),
    ("--model.model nowhere.Net", "model.model: class 'nowhere.Net' cannot be imported: No module named 'nowhere'"),
    ("--model.model.norm 3", "norm='3' is unknown; use one of bn, gn, ln, in, gn_ws, fed_ws, weight_norm, scaled_ws, fn, none (CIFARResNet also: fixup)"),
    ("--model.model.groups x", "LeNet.groups: x is not valid; it takes int"),
    ("--model.model.norm gn --model.model.groups 7", "groups=7 does not divide a layer of 32 channels; use a divisor of 32"),
    ("--model.model.num_classes x", "LeNet.num_classes: x is not valid; it takes int"),
    ("--model.model.num_classes 0", "model.model.init_args.num_classes: 0 contradicts the data set, which decides: its num_classes is 10; leave it out"),
    ("--model.model.in_channels 3", "model.model.init_args.in_channels: 3 contradicts the data set, which decides: its in_channels is 1; leave it out"),
    ("--model.model.image_size 9", "model.model.init_args.image_size: 9 contradicts the data set, which decides: its image_size is 8; leave it out"),
    ("--model.seed 3", "Linked \"model.seed\" must be given via \"seed_everything\"."),
    ("--model.task Regression", "model.task: there is no class 'Regression'; there are Classification, Segmentation"),
    ("--model.task LeNet", "model.task: the class 'LeNet' is of another kind; there are Classification, Segmentation"),
    ("--model 3", "model: 3 holds no settings such as model.model"),
    ("--model []", "model: [] holds no settings such as model.model"),
    ("--data 3", "data: there is no class '3'; " + DATA),
    ("--data MNIST", "data: there is no class 'MNIST'; did you mean FEMNIST?"),
    ("--data LeNet", "data: the class 'LeNet' is of another kind; " + DATA),
    ("--data nowhere.Data", "data: class 'nowhere.Data' cannot be imported: No module named 'nowhere'"),
    ("--data.num_clients 0", "num_clients must be at least 1, found 0"),
    ("--data.num_clients -1", "num_clients must be at least 1, found -1"),
    ("--data.num_clients 1.5", "Digits.num_clients: 1.5 is not valid; it takes int"),
    ("--data.num_clients 5000", "num_clients must be in [1, 240], as there are 240 training samples; found 5000"),
    ("--data.batch_size 0", "batch_size must be at least 1, found 0"),
    ("--data.batch_size x", "Digits.batch_size: x is not valid; it takes int"),
    ("--data.val_fraction -0.1", "val_fraction must be in [0, 1), such as 0.1, found -0.1"),
    ("--data.val_fraction 1", "val_fraction must be in [0, 1), such as 0.1, found 1.0"),
    ("--data.val_fraction x", "Digits.val_fraction: x is not valid; it takes float"),
    ("--data.max_examples 0", "max_examples must be at least 1, found 0"),
    ("--data.max_examples -3", "max_examples must be at least 1, found -3"),
    ("--data.seed 9", "data.seed: 9 contradicts seed_everything: 0, which decides; leave it out"),
    ("--data.download true", "Digits: there is no setting 'download' among num_clients, batch_size, crop_padding, horizontal_flip, sampling, canaries, partition, val_fraction, eval_batch_size, seed, max_examples, min_examples, held_out"),
    ("--data.partition 3", "Digits.partition: there is no class '3'; there are Dirichlet, ExtendedDirichlet, FromFile, GammaSimilarity, HonestOnly, IID, Natural, Shards"),
    ("--data.partition IDD", "Digits.partition: there is no class 'IDD'; did you mean IID?"),
    ("--data.partition SGD", "Digits.partition: the class 'SGD' is of another kind; there are Dirichlet, ExtendedDirichlet, FromFile, GammaSimilarity, HonestOnly, IID, Natural, Shards"),
    ("--data.partition Dirichlet", "Dirichlet: the following arguments are required: alpha"),
    ("--data.partition Dirichlet --data.partition.alpha x", "Dirichlet.alpha: x is not valid; it takes float"),
    ("--data.partition Dirichlet --data.partition.alpha .inf", "alpha must be a positive number, found inf; IID() is the limit alpha = inf"),
    ("--data.partition Shards --data.partition.class_fraction 0", "class_fraction must be in (0, 1], such as 0.2, found 0.0"),
    ("--data.partition Shards --data.partition.class_fraction x", "Shards.class_fraction: x is not valid; it takes float"),
    ("--data.colour 3", "Digits: there is no setting 'colour' among num_clients, batch_size, crop_padding, horizontal_flip, sampling, canaries, partition, val_fraction, eval_batch_size, seed, max_examples, min_examples, held_out"),
    ("--data CIFAR10", "data_dir=data/cifar10 holds neither cifar-10-batches-py/ nor train/; set download: true to fetch CIFAR-10 (170 MB), or data_dir to a folder with torchvision's files or with train/<class>/*.jpg and test/<class>/*.jpg"),
    ("--data CIFAR10 --data.data_dir tiny.yaml", "data_dir=tiny.yaml holds neither cifar-10-batches-py/ nor train/; set download: true to fetch CIFAR-10 (170 MB), or data_dir to a folder with torchvision's files or with train/<class>/*.jpg and test/<class>/*.jpg"),
    ("--data ImageFolder", "ImageFolder: the following arguments are required: data_dir, image_size"),
    ("--data ImageFolder --data.data_dir . --data.image_size 0", "image_size must be at least 1, found 0"),
    ("--trainer.callbacks 3", "trainer.callbacks: there is no class '3'; give one that this setting takes, or the dotted path of your own"),
    ("--trainer.callbacks FixBN,FedProx", "trainer.callbacks: there is no class 'FixBN,FedProx'; give one class, or for a list [FixBN,FedProx]"),
    ("--trainer.callbacks Dirichlet", "trainer.callbacks: the class 'Dirichlet' is of another kind; give one that this setting takes, or the dotted path of your own"),
    ("--trainer.callbacks FixBN --trainer.callbacks.freeze_round -1", "FixBN.freeze_round: -1 must be a round >= 0, or a fraction in [0, 1]"),
    ("--trainer.callbacks FixBN --trainer.callbacks.freeze_round 1.5", "FixBN.freeze_round: 1.5 must be a round >= 0, or a fraction in [0, 1]"),
    ("--trainer.callbacks FixBN --trainer.callbacks.freeze_round half", "FixBN.freeze_round: half is not valid; it takes int, float"),
    ("--trainer.callbacks FixBN --trainer.callbacks.freeze null", "FixBN.freeze: null is not valid; it takes ['statistics', 'affine', 'both']"),
    ("--trainer.callbacks FixBN --trainer.callbacks.freeze all", "FixBN.freeze: all is not valid; it takes ['statistics', 'affine', 'both']"),
    ("--trainer.callbacks FedProx --trainer.callbacks.mu -1", "FedProx.mu: -1.0 must be at least 0 (0 is FedAvg)"),
    ("--trainer.callbacks FedProx --trainer.callbacks.mu x", "FedProx.mu: x is not valid; it takes float"),
    ("--trainer.callbacks ClientGradientClipping", "ClientGradientClipping: the following arguments are required: max_norm"),
    ("--trainer.callbacks ClientGradientClipping --trainer.callbacks.max_norm 0", "ClientGradientClipping.max_norm: 0.0 must be above 0 (.inf is possible)"),
    ("--trainer.callbacks SlidingWindowFixBN", "SlidingWindowFixBN: the following arguments are required: window, threshold"),
    ("--trainer.callbacks nowhere.Mine", "trainer.callbacks: class 'nowhere.Mine' cannot be imported: No module named 'nowhere'"),
    ("--trainer.callbacks EarlyStopping", "EarlyStopping: the following arguments are required: monitor"),
    ("--trainer.callbacks+ FixBN", "callbacks FixBN and FixBN cannot be combined: both decide over the round from which BN state is frozen; use one of them"),
    ("--trainer.callbacks+ FBN", "callbacks FixBN and FBN cannot be combined: one wants mean averaged, the other pooled, in round 1"),
    ("--trainer 3", "trainer: 3 holds no settings such as trainer.accelerator"),
    ("--trainer.max_epochs x", "trainer.max_epochs: x is not valid; it takes int, null"),
    ("--trainer.max_epochs 1.5", "trainer.max_epochs: 1.5 is not valid; it takes int, null"),
    ("--trainer.max_epochs nan", "trainer.max_epochs: nan is not valid; it takes int, null"),
    ("--trainer.num_nodes 2", "trainer.num_nodes: 2 needs MASTER_ADDR, MASTER_PORT and NODE_RANK in each node's environment; torchrun sets them"),
    ("--trainer.num_nodes x", "trainer.num_nodes: x is not valid; it takes int"),
    ("--trainer.fast_dev_run x", "trainer.fast_dev_run: x is not valid; it takes int, bool"),
    ("--trainer.log_every_n_steps x", "trainer.log_every_n_steps: x is not valid; it takes int, null"),
    ("--trainer.benchmark 5", "trainer.benchmark: 5 is not valid; it takes bool, null"),
    ("--trainer.deterministic x", "trainer.deterministic: x is not valid; it takes bool, ['warn'], null"),
    ("--trainer.detect_anomaly x", "trainer.detect_anomaly: x is not valid; it takes bool"),
    ("--trainer.enable_progress_bar 3", "trainer.enable_progress_bar: 3 is not valid; it takes bool, null"),
    ("--trainer.check_val_every_n_epoch x", "trainer.check_val_every_n_epoch: x is not valid; it takes int, null"),
    ("--trainer.check_val_every_n_epoch -1", "trainer.check_val_every_n_epoch: -1 must be at least 1 round"),
    ("--trainer.colour 3", "there is no setting 'trainer.colour'; did you mean trainer.logger or trainer.plugins or trainer.accelerator?"),
    ("--trainer.plugins x", "trainer.plugins: there is no class 'x'; did you mean XLAPrecision or XLAPrecisionPlugin or XLABf16PrecisionPlugin?"),
    ("--trainer.overfit_batches x", "trainer.overfit_batches: x is not valid; it takes int, float"),
    ("--checkpoint.every_n_rounds 0", "every_n_rounds must be >= 1 or null, found 0"),
    ("--checkpoint.every_n_rounds x", "checkpoint.every_n_rounds: x is not valid; it takes int, null"),
    ("--checkpoint.every_n_seconds -1", "every_n_seconds must be >= 0 or null, found -1.0"),
    ("--checkpoint.every_n_seconds x", "checkpoint.every_n_seconds: x is not valid; it takes float, null"),
    ("--checkpoint.keep_rounds [0]", "keep_rounds: [0] must be rounds >= 1"),
    ("--checkpoint.keep_rounds 3", "checkpoint.keep_rounds: 3 is not valid; it takes list[int], null"),
    ("--checkpoint.keep_rounds [x]", "checkpoint.keep_rounds: [x] is not valid; it takes list[int], null"),
    ("--checkpoint.mode best", "checkpoint.mode: best is not valid; it takes ['max', 'min'], null"),
    ("--checkpoint 3", "checkpoint: 3 holds no settings such as checkpoint.every_n_seconds"),
    ("--checkpoint.colour 3", "there is no setting 'checkpoint.colour'; did you mean checkpoint.monitor or checkpoint.mode or checkpoint?"),
    ("--wandb.mode sometimes", "wandb.mode: sometimes is not valid; it takes ['auto', 'online', 'offline', 'disabled']"),
    ("--wandb.tags 3", "wandb.tags: 3 is not valid; it takes Sequence[str]"),
    ("--wandb.log_checkpoints 3", "wandb.log_checkpoints: 3 is not valid; it takes bool"),
    ("--wandb 3", "wandb: 3 holds no settings such as wandb.mode"),
    ("--wandb.colour 3", "there is no setting 'wandb.colour'; did you mean wandb.mode?"),
    ("--name ../x", "name: '../x' is no folder below run_root runs; use a name such as mine"),
    (f"--name {'a' * 300}", "name: aaaaaaaaaaaaaaaaaaaa... is too long; use at most 255 bytes for a name"),
    (f"--name {'a' * 300} --ckpt_path auto", "name: aaaaaaaaaaaaaaaaaaaa... is too long; use at most 255 bytes for a name"),
    (f"--run_root {'ä' * 128}", "run_root: ääääääääääääääääääää... is too long; use at most 255 bytes for a name"),
    (f"--ckpt_path /{'a' * 300}/last.ckpt", "ckpt_path: aaaaaaaaaaaaaaaaaaaa... is too long; use at most 255 bytes for a name"),
    ("--trainer.callbacks torch.nn.Linear", "trainer.callbacks: torch.nn.Linear is no Callback, nor a function annotated to return one; give one that this setting takes, or the dotted path of your own"),
    ("--data torch.nn.Linear", "data: torch.nn.Linear is no FederatedDataModule, nor a function annotated to return one; there are CIFAR10, CIFAR100, Cityscapes, Digits, FEMNIST, FashionMNIST, Gaussians, HuggingFaceImages, ImageDomains, ImageFolder, ImageNet, ScikitLearn, StreamedImages, TensorData, TinyImageNet, TorchvisionImages"),
    ("--name a/../../x", "name: 'a/../../x' is no folder below run_root runs; use a name such as mine"),
    ("--run_root ~nouser/x", "run_root: '~nouser/x' is no path of a local or mounted file system; give another path"),
    ("--run_root tiny.yaml", "tiny.yaml/tiny/HASH-s0 cannot be written: Not a directory; free space or choose another folder"),
    ("--ckpt_path=", "ckpt_path: '' is no path of a local or mounted file system; give another path"),
    ("--ckpt_path ~nouser/x", "ckpt_path: '~nouser/x' is no path of a local or mounted file system; give another path"),
    ("--ckpt_path nowhere.ckpt", "checkpoint nowhere.ckpt does not exist; give a file, 'last', 'best' or 'auto'"),
    ("--ckpt_path tiny.yaml", "checkpoint tiny.yaml is truncated, damaged or holds more than tensors and plain values (601 bytes, BadZipFile); use another one"),
    ("--ckpt_path best", "ckpt_path 'best' found no best.ckpt in runs/tiny/HASH-s0; give the path of a checkpoint, or start without ckpt_path"),
    ("--threads 0", "threads: 0 is not valid; it takes int_from_1_to_1024, null"),
    ("--threads 100000000", "threads: 100000000 is not valid; it takes int_from_1_to_1024, null"),
    ("--threads x", "threads: x is not valid; it takes int_from_1_to_1024, null"),
    ("--seed_everything x", "seed_everything: x must be a whole number from 0 to 4294967295"),
    ("--seed_everything 4294967296", "seed_everything: 4294967296 must be a whole number from 0 to 4294967295"),
    ("--seed_everything 1.5", "seed_everything: 1.5 must be a whole number from 0 to 4294967295"),
    ("--seed_everything null", "seed_everything: None must be a whole number from 0 to 4294967295"),
    ("--colour 3", "there is no setting 'colour'"),
    ("--c 3", "there is no setting 'c'; did you mean config or checkpoint.every_n_seconds or checkpoint.every_n_rounds?"),
    ("extra", "unrecognized arguments: extra"),
    ("--config ~nouser/x.yaml", "config: '~nouser/x.yaml' is no path of a local or mounted file system; give another path"),
    ({"model.client_optimizer": {"class_path": "SGD", "init_args": {"lr": INF}}}, "client_optimizer: SGD.lr: inf must be finite; use SGD, Adam, AdamW, RMSprop or Adagrad with settings that they take"),
    ({"model.server_optimizer": {"class_path": "SGD", "init_args": {"lr": INF}}}, "server_optimizer: SGD.lr: inf must be finite; use SGD(lr=1), which is FedAvg, or SGD, Adam or Adagrad with other settings"),
    ({"model.client_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": INF}}}, "client_optimizer: SGD.momentum: inf must be finite; use SGD, Adam, AdamW, RMSprop or Adagrad with settings that they take"),
    ({"model.server_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1, "momentum": INF}}}, "server_optimizer: SGD.momentum: inf must be finite; use SGD(lr=1), which is FedAvg, or SGD, Adam or Adagrad with other settings"),
    ({"model.client_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1, "weight_decay": INF}}}, "client_optimizer: SGD.weight_decay: inf must be finite; use SGD, Adam, AdamW, RMSprop or Adagrad with settings that they take"),
    ({"model.server_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1, "weight_decay": INF}}}, "server_optimizer: SGD.weight_decay: inf must be finite; use SGD(lr=1), which is FedAvg, or SGD, Adam or Adagrad with other settings"),
    ({"model.budget_epochs": INF}, "budget_epochs: inf must be positive and finite"),
    ({"model.parameter_groups": {"bias": {"lr": INF}}}, "parameter_groups.bias (lr: inf): SGD.lr: inf must be finite"),
    ({"model.parameter_groups": {"bias": {"lr_scale": INF}}}, "parameter_groups.bias.lr_scale: inf must be at least 0 and finite (0 freezes the group)"),
    ({"model.client_lr_schedule": {"class_path": "MultiStep", "init_args": {"milestones": [2], "gamma": INF}}}, "MultiStep.gamma: inf must be above 0 and finite"),
    ({"trainer": []}, "trainer: [] holds no settings such as trainer.accelerator"),
    ({"wandb": []}, "wandb: [] holds no settings such as wandb.mode"),
    ({"checkpoint": {"keep_rounds": 3}}, "checkpoint.keep_rounds: 3 is not valid; it takes list[int], null"),
    ({"model": [1]}, "model: [1] holds no settings such as model.model"),
    ({"model": {}}, "the following arguments are required: model.model"),
    ({"data": [1]}, "data: [1] is a list, not one class; " + DATA),
    ({"data": {}}, "model.model.init_args.num_classes: the data set does not define its num_classes; set model.model.init_args.num_classes, or num_classes in the data module"),
    ({"ckpt_path": ""}, "ckpt_path: '' is no path of a local or mounted file system; give another path"),
    ({"name": "a\x00b"}, "name: 'a\\x00b' is no folder below run_root runs; use a name such as mine"),
    ({"run_root": "a\x00b"}, "run_root: 'a\\x00b' is no path of a local or mounted file system; give another path"),
    ({"ckpt_path": "a\x00b"}, "ckpt_path: 'a\\x00b' is no path of a local or mounted file system; give another path"),
    ({"name": "/x"}, "name: '/x' is no folder below run_root runs; use a name such as mine"),
    ({"threads": -1}, "threads: -1 is not valid; it takes int_from_1_to_1024, null"),
    ({"trainer.callbacks": 3}, "trainer.callbacks: 3 is no class; give one that this setting takes, or the dotted path of your own"),
    ({"trainer.callbacks": [3]}, "trainer.callbacks: [3] is no class; give one that this setting takes, or the dotted path of your own"),
    ({"trainer.callbacks": [{"class_path": 3}]}, "trainer.callbacks: 3 is no class; give one that this setting takes, or the dotted path of your own"),
    ({"model.model": {"class_path": ["LeNet"]}}, "model.model: ['LeNet'] is a list, not one class; give one that this setting takes, or the dotted path of your own"),
    ({"model.model": {"class_path": "LeNet", "norm": "gn"}}, "model.model: norm beside class_path: LeNet; settings of a class go below its init_args"),
    ({"model.model": {"class_path": "LeNet", "init_args": [1]}}, "model.model: init_args of LeNet: [1] must be settings with names, such as {name: value}"),
    ({"data": {"class_path": "Digits", "init_args": 3}}, "data: init_args of Digits: 3 must be settings with names, such as {name: value}"),
    ({"trainer.callbacks": [{"class_path": "FixBN", "init_args": 0.5}]}, "trainer.callbacks: init_args of FixBN: 0.5 must be settings with names, such as {name: value}"),
    ({"model.client_lr_schedule": ["MultiStep"]}, "model.client_lr_schedule: ['MultiStep'] is a list, not one class; there are InverseSteps, MultiStep"),
    ("--model.client_optimizer [SGD]", "model.client_optimizer: [SGD] is a list, not one class; give one that this setting takes, or the dotted path of your own"),
    ({"trainer.callbacks": [byzantine(attack=["SignFlip"])]}, "Byzantine.attack: ['SignFlip'] is a list, not one class; " + ATTACKS),
    ({"trainer.callbacks": [byzantine(attack="torch.nn.Linear")]}, "Byzantine.attack: torch.nn.Linear is no Attack, nor a function annotated to return one; " + ATTACKS),
    ({"trainer.callbacks": [byzantine(clients=[[1]])]}, "Byzantine.clients: [[1]] is not valid; it takes int, float, Sequence[int]"),
    ({"model.failures": {"dropout": {"a": 0.5}}}, "ClientFailures.dropout: 'a' must be a client's number, such as 7"),
    ({"trainer.callbacks": ["FixBM"]}, "trainer.callbacks: there is no class 'FixBM'; did you mean FixBN?"),
    ({"trainer.callbacks": [{"class_path": "FixBN"}, {"class_path": "FBN"}]}, "callbacks FixBN and FBN cannot be combined: one wants mean averaged, the other pooled, in round 1"),
    ({"model.model": "nowhere.yaml"}, "model.model: class 'nowhere.yaml' cannot be imported: No module named 'nowhere'"),
    ({"model.metrics": {"f1": {"class_path": "torchmetrics.F1Score", "init_args": {"task": "multiclass"}}, "f2": {"class_path": "torchmetrics.F2Score"}}},
     "model.metrics.f2: class 'torchmetrics.F2Score' cannot be imported: module 'torchmetrics' has no attribute 'F2Score'; did you mean R2Score or F1Score or CHRFScore?"),
    ({"model.metrics": {"f2": {"class_path": "nowhere.F2"}}}, "model.metrics.f2: class 'nowhere.F2' cannot be imported: No module named 'nowhere'"),
]  # fmt: skip


def left_behind():
    return [path.name for path in Path().iterdir() if path.name != "tiny.yaml"]


@pytest.mark.parametrize(("given", "line"), TABLE, ids=[str(given) for given, _ in TABLE])
def test_value_is_refused_in_a_line_and_leaves_nothing(given, line, capsys):
    write_config(given if isinstance(given, dict) else {})
    message = message_of(capsys, lambda: run(*(given.split() if isinstance(given, str) else ())))
    message = re.sub(r" \(tiny.yaml, line \d+\)$", "", message.rstrip())  # see test_bad_files
    assert re.sub("[0-9a-f]{8}-s0", "HASH-s0", message) == f"error: {line}"
    assert left_behind() == []


NAN = float("nan")
MULTISTEP = {"class_path": "MultiStep", "init_args": {"milestones": [1], "gamma": NAN}}
NUMBERS = {
    "model.budget_epochs": NAN,
    "model.bn_momentum": NAN,
    "model.participation": NAN,
    "model.parameter_groups.bias.lr": {"model.parameter_groups": {"bias": {"lr": NAN}}},
    "model.client_lr_schedule.gamma": {"model.client_lr_schedule": MULTISTEP},
    "data.val_fraction": {"data.init_args.val_fraction": NAN},
    "data.partition.alpha": {"data.init_args.partition": {"class_path": "Dirichlet", "init_args": {"alpha": NAN}}},
    "checkpoint.every_n_seconds": {"checkpoint": {"every_n_seconds": NAN}},
    "trainer.callbacks.mu": {"trainer.callbacks": [{"class_path": "FedProx", "init_args": {"mu": NAN}}]},
} | {
    f"model.{side}_optimizer.{name}": {f"model.{side}_optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1, name: NAN}}}
    for side in ("client", "server")
    for name in ("lr", "momentum", "weight_decay", "dampening")
}  # fmt: skip


@pytest.mark.parametrize(("setting", "changes"), NUMBERS.items(), ids=NUMBERS)
def test_nan_is_refused_wherever_a_setting_takes_a_number(setting, changes, capsys):
    write_config(changes if isinstance(changes, dict) else {setting: changes})
    assert message_of(capsys, run) == f"error: {setting}: nan is no number; give a number\n"
    assert left_behind() == []


def test_a_folder_with_the_name_of_a_shipped_package_needs_an_init(capsys):
    Path("callbacks").mkdir()
    Path("callbacks/mine.py").write_text("class Mine:\n    pass\n")
    message = message_of(capsys, lambda: run("--trainer.callbacks", "callbacks.mine.Mine"))
    assert message == (
        "error: trainer.callbacks: class 'callbacks.mine.Mine' cannot be imported: module 'fl_lightning.callbacks' has no "
        "attribute 'mine'; your folder callbacks needs an __init__.py\n"
    )
