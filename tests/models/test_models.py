import copy
from collections.abc import Callable

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state
from torchvision.models import resnet18

from fl_lightning import FederatedModule
from fl_lightning.callbacks import FBN
from fl_lightning.errors import ConfigurationError
from fl_lightning.models import FBNCNN, CIFARResNet, LeNet, ResNet8, ResNet18, ResNet20, ResNet32, TabularMLP
from fl_lightning.models.dropout import Dropout, dropout_keys
from fl_lightning.models.norm import make_norm
from tests.support.helpers import SGD, blobs, fit

pytestmark = pytest.mark.first_steps

NORMS = ["bn", "gn", "ln", "in", "gn_ws", "fed_ws", "weight_norm", "scaled_ws", "fn", "none"]
SMALL: dict[str, Callable[..., nn.Module]] = {
    "resnet8": lambda **settings: ResNet8(width=4, **settings),
    "resnet18": lambda **settings: ResNet18(width=4, **settings),
    "lenet": lambda **settings: LeNet(image_size=8, **settings),
    "fbn_cnn": lambda **settings: FBNCNN(image_size=8, **settings),
}
PAIRS = {(name, norm) for name in SMALL for norm in NORMS} | {("resnet8", "fixup")}
every_model_and_norm = pytest.mark.parametrize(
    ("name", "norm"),
    sorted(PAIRS - {("resnet18", "in")}),  # whose last maps have one pixel here
)


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trainable_floats(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def batch_norm_channels(model: nn.Module) -> list[int]:
    return [module.num_features for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


def multiply_adds(model: nn.Module, image: Tensor) -> int:
    """Multiply-adds of the convolutions and linear layers for one image ``[channels, height, width]``."""
    counts = []

    def count(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        counts.append(output.numel() * module.weight[0].numel())

    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(count)
    model.eval()(image[None])
    return sum(counts)


@pytest.mark.parametrize(
    ("model", "floats", "layers", "channels", "macs"),
    [
        (ResNet8(), 75_290, 7, 240, 12.24e6),
        (ResNet20(), 269_722, 19, 688, 40.55e6),
        (ResNet32(), 464_154, 31, 1136, 68.86e6),
        (ResNet18(), 11_173_962, 20, 4800, 555.42e6),
        (LeNet(), 89_706, 3, 128, 12.30e6),
        (FBNCNN(), 1_310_922, 4, 384, 97.19e6),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_sizes_are_those_of_the_papers(model, floats, layers, channels, macs):
    assert trainable_floats(model) == floats
    assert len(batch_norm_channels(model)) == layers
    assert sum(batch_norm_channels(model)) == channels
    assert multiply_adds(copy.deepcopy(model), torch.zeros(3, 32, 32)) == pytest.approx(macs, rel=5e-4)


def test_lenet_pools_before_the_first_norm_and_after_the_other_two():
    layers = [(type(layer).__name__, getattr(layer, "kernel_size", None)) for layer in LeNet().features]
    convolution, maximum, average = ("Conv2d", (5, 5)), ("MaxPool2d", 3), ("AvgPool2d", 3)
    norm = [("BatchNorm2d", None), ("ReLU", None)]
    later = [convolution, *norm, average]
    assert layers == [convolution, maximum, *norm, *later, *later]


def test_fbn_cnn_has_the_layers_of_table_one_in_order():
    kinds = [type(module).__name__ for module in (*FBNCNN().features, *FBNCNN().classifier)]
    block = ["Conv2d", "ReLU", "BatchNorm2d"]
    half = [*block, *block, "MaxPool2d", "Dropout"]
    assert kinds == [*half, *half, "Linear", "ReLU", "Linear", "LogSoftmax"]
    dropouts = [module for module in FBNCNN().modules() if isinstance(module, Dropout)]
    assert [(layer.p, layer.layer) for layer in dropouts] == [(0.25, 0), (0.25, 1)]


def test_fbn_cnn_can_be_narrower_and_normalise_before_the_relu():
    model = FBNCNN(width=16, order="bn_relu")
    assert batch_norm_channels(model) == [16, 16, 32, 32]
    kinds = [type(module).__name__ for module in model.features]
    assert kinds[:3] == ["Conv2d", "BatchNorm2d", "ReLU"]
    assert trainable_floats(model) == trainable_floats(FBNCNN(width=16))


def test_fbn_cnn_returns_log_probabilities():
    output = FBNCNN(image_size=8)(torch.randn(4, 3, 8, 8))
    assert torch.allclose(output.exp().sum(dim=1), torch.ones(4), atol=1e-5)


@every_model_and_norm
@pytest.mark.parametrize(("num_classes", "in_channels"), [(10, 1), (7, 3)])
def test_output_is_one_row_of_scores_per_image(name, norm, num_classes, in_channels):
    model = SMALL[name](num_classes=num_classes, in_channels=in_channels, norm=norm)
    assert model(torch.randn(2, in_channels, 8, 8)).shape == (2, num_classes)


@pytest.mark.parametrize("image_size", [8, 9, 15, 28])
@pytest.mark.parametrize("model", [LeNet, FBNCNN])
def test_any_image_size_from_eight_pixels_works(model, image_size):
    assert model(image_size=image_size)(torch.randn(2, 3, image_size, image_size)).shape == (2, 10)


@every_model_and_norm
def test_vmap_over_clients_equals_a_loop_over_clients(name, norm):
    clients = [SMALL[name](in_channels=1, norm=norm).double() for _ in range(3)]
    for client, key in zip(clients, dropout_keys(0, 1, range(3), 0), strict=True):
        for module in client.modules():
            if isinstance(module, Dropout):
                module.key.fill_(key)
    images = torch.randn(3, 4, 1, 8, 8, dtype=torch.float64)
    labels = torch.randint(10, (3, 4))
    params, buffers = stack_module_state(clients)
    blank = SMALL[name](in_channels=1, norm=norm).double()

    def loss(client_params, client_buffers, client_images, client_labels):
        scores = functional_call(blank, (client_params, client_buffers), (client_images,))
        return nn.functional.cross_entropy(scores, client_labels), scores

    stacked_grads, stacked_scores = torch.vmap(grad(loss, has_aux=True))(params, buffers, images, labels)
    assert stacked_scores.shape == (3, 4, 10)
    for i, client in enumerate(clients):
        scores = client(images[i])
        nn.functional.cross_entropy(scores, labels[i]).backward()
        assert torch.allclose(stacked_scores[i], scores, rtol=1e-10, atol=1e-12)
        for key, parameter in client.named_parameters():
            assert torch.allclose(stacked_grads[key][i], parameter.grad, rtol=1e-8, atol=1e-12)
        for key, buffer in client.named_buffers():
            assert torch.allclose(buffers[key][i], buffer, rtol=1e-10)


@every_model_and_norm
def test_only_batch_norm_lets_one_image_change_the_output_of_another(name, norm):
    model = SMALL[name](norm=norm).double()
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    others_changed = torch.cat([images[:1], torch.randn(3, 3, 8, 8, dtype=torch.float64)])
    same = torch.allclose(model(images)[0], model(others_changed)[0], rtol=1e-10)
    assert same == (norm != "bn")


def test_group_norm_normalises_each_image_in_the_given_number_of_groups():
    x = 3 + 5 * torch.randn(4, 6, 5, 5, dtype=torch.float64)
    normalised = make_norm("gn", 6, groups=2).double()(x).reshape(4, 2, 3 * 5 * 5)
    assert torch.allclose(normalised.mean(dim=2), torch.zeros(4, 2, dtype=torch.float64), atol=1e-10)
    assert torch.allclose(
        normalised.var(dim=2, correction=0), torch.ones(4, 2, dtype=torch.float64), atol=1e-5
    )


@every_model_and_norm
def test_a_convolution_has_a_bias_unless_a_norm_layer_takes_its_place(name, norm):
    biases = {
        module.bias is not None
        for module in SMALL[name](norm=norm).modules()
        if isinstance(module, nn.Conv2d)
    }
    assert biases == {norm in ("none", "weight_norm", "scaled_ws") or name == "fbn_cnn"}


def test_resnet_shortcut_subsamples_and_pads_with_zero_channels():
    block = next(block for block in ResNet8().blocks if block.stride == 2)
    x = torch.randn(2, 16, 8, 8)
    shortcut = block.shortcut(x)
    assert torch.equal(shortcut[:, :16], x[:, :, ::2, ::2])
    assert not shortcut[:, 16:].any()
    assert shortcut.shape == (2, 32, 4, 4)


def test_resnet_block_with_silenced_branch_is_relu_of_its_shortcut():
    block = ResNet8().blocks[1]
    nn.init.zeros_(block.norm2.weight)
    x = torch.randn(2, 16, 8, 8)
    assert torch.equal(block(x), block.shortcut(x).relu())


def test_resnet_convolutions_start_with_variance_two_over_fan_in():
    for module in ResNet20().modules():
        if isinstance(module, nn.Conv2d):
            n = module.weight.numel()
            fan_in = module.weight[0].numel()
            assert module.weight.var().item() * fan_in / 2 == pytest.approx(1, abs=5 * (2 / n) ** 0.5)


def test_resnet18_with_the_stem_of_imagenet_is_that_of_torchvision():
    theirs, ours = resnet18(), ResNet18(num_classes=1000, stem="imagenet")
    assert trainable_floats(ours) == trainable_floats(theirs) == 11_689_512
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    images = torch.randn(2, 3, 64, 48)
    torch.testing.assert_close(ours(images), theirs(images))
    torch.testing.assert_close(ours.eval()(images), theirs.eval()(images))


def test_lenet_average_pool_divides_by_the_pixels_inside_the_image():
    pool = next(module for module in LeNet().features if isinstance(module, nn.AvgPool2d))
    assert torch.equal(pool(torch.ones(1, 1, 16, 16)), torch.ones(1, 1, 8, 8))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ResNet20(norm="batch"), "norm='batch' is unknown; use one of bn, gn, ln, in"),
        (lambda: ResNet20(norm="gn", groups=3), "groups=3 does not divide a layer of 16 channels"),
        (lambda: LeNet(norm="gn", groups=0), "groups=0 does not divide"),
        (lambda: CIFARResNet(depth=18), "depth=18 is not 6n"),
        (lambda: CIFARResNet(depth=2), "depth=2 is not 6n"),
        (lambda: ResNet8(width=0), "width must be at least 1, found 0"),
        (lambda: LeNet(num_classes=0), "num_classes must be at least 1, found 0"),
        (lambda: LeNet(image_size=7), "image_size must be at least 8, found 7"),
        (lambda: FBNCNN(image_size=3), "image_size must be at least 4, found 3"),
        (lambda: FBNCNN(dropout=1.5), "Dropout.p: 1.5 must be at least 0 and at most 1"),
        (lambda: FBNCNN(width=0), "width must be at least 1, found 0"),
        (lambda: TabularMLP(norm="in"), "norm: 'in' must be one of bn, gn, ln, none"),
        (lambda: TabularMLP(norm="gn", groups=3), "groups=3 does not divide a layer of 64"),
        (lambda: ResNet18(stem="stl"), "ResNet18.stem: 'stl' must be one of cifar, imagenet"),
        (lambda: FBNCNN(order="bn"), "FBNCNN.order: 'bn' must be one of relu_bn, bn_relu"),
    ],
)
def test_unusable_settings_are_refused_in_one_line(build, message):
    with pytest.raises(ConfigurationError, match=message) as error:
        build()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 32, 32), "in_channels=3 but the images have 1"),
        ((2, 3, 28, 28), "image_size=32 but the images are 28x28; set image_size to 28"),
        ((2, 3, 32, 24), "image_size=32 but the images are 32x24; crop"),
    ],
)
@pytest.mark.parametrize("model", [LeNet(), FBNCNN()], ids=["lenet", "fbn_cnn"])
def test_images_of_another_shape_are_refused_with_the_setting_to_change(model, shape, message):
    with pytest.raises(ConfigurationError, match=message):
        model(torch.zeros(shape))


@pytest.mark.parametrize("model", [ResNet8, ResNet18, ResNet20, ResNet32, LeNet, FBNCNN])
def test_a_bare_class_name_selects_the_model_on_the_command_line(model):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model", type=nn.Module)
    chosen = parser.parse_args(
        [f"--model={model.__name__}", "--model.norm=gn", "--model.num_classes=7"]
    ).model
    assert chosen.class_path in (
        f"fl_lightning.models.{model.__name__}",
        f"{model.__module__}.{model.__name__}",
    )
    assert model(**chosen.init_args)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize("norm", NORMS)
def test_a_xavier_start_is_uniform_within_the_bound_of_glorot_with_zero_biases(norm):
    model, plain = ResNet8(init="xavier", norm=norm), ResNet8(norm=norm)
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(layers) == 8
    for layer in layers:
        outputs, inputs, *kernel = layer.weight.shape
        area = kernel[0] * kernel[1] if kernel else 1
        bound = (6 / (area * (inputs + outputs))) ** 0.5
        drawn = (layer.weight.detach() / bound).flatten()
        # uniform on [-1, 1]: no value beyond, and variance 1 / 3
        assert 0.98 < drawn.abs().max() <= 1
        assert drawn.square().mean().item() == pytest.approx(1 / 3, abs=4 * (4 / 45 / len(drawn)) ** 0.5)
        assert layer.bias is None or not layer.bias.any()
        if norm == "weight_norm" and kernel:
            assert torch.equal(layer.gain, layer.weight.flatten(1).norm(dim=1))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert plain.conv.weight.abs().max() > (6 / (9 * 19)) ** 0.5  # the default is another


def test_an_unknown_start_and_xavier_for_fixup_are_refused():
    with pytest.raises(ConfigurationError, match="init: 'glorot' must be one of he, xavier"):
        ResNet20(init="glorot")
    with pytest.raises(ConfigurationError, match="init: 'xavier' must be one of he"):
        ResNet8(norm="fixup", init="xavier")


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nn.LazyLinear(3), r"layer '1' \(LazyLinear\) has no sizes yet; give it sizes"),
        (nn.LazyBatchNorm1d(affine=False), r"layer '1' \(LazyBatchNorm1d\) has no sizes yet"),
        (nn.Embedding(5, 3, sparse=True), r"layer '1' \(Embedding\) has sparse=True; use sparse=False"),
        (nn.EmbeddingBag(5, 3, sparse=True), r"layer '1' \(EmbeddingBag\) has sparse=True"),
    ],
)
def test_layers_whose_weights_clients_cannot_have_are_refused_in_one_line(layer, words):
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(ConfigurationError, match=words) as refused:
        FederatedModule(model, SGD, local_steps=1)
    assert "\n" not in str(refused.value)


def test_a_lazy_layer_that_has_seen_a_batch_is_trained_also_with_fbn():
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3)).double()
    model.eval()(torch.zeros(1, 2, 6, 6, dtype=torch.float64))
    before = model[0].weight.detach().clone()
    module = FederatedModule(model.train(), SGD, local_steps=1)
    fit(module, blobs(), rounds=1, callbacks=[FBN()])
    assert not torch.equal(model[0].weight.detach(), before)
