import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.errors import ConfigurationError
from fl_lightning.models.dropout import Dropout, convert_dropout, dropout_keys

KEYS = dropout_keys(seed=0, round=1, client_ids=range(64), step=0)


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def apply(layer: Dropout, key: Tensor | int, x: Tensor) -> Tensor:
    return functional_call(layer, {"key": torch.as_tensor(key)}, (x,))


def masks(keys, n: int = 4096, p: float = 0.5, layer: int = 0) -> Tensor:
    module = Dropout(p)
    module.layer = layer
    return torch.stack([apply(module, key, torch.ones(n)) != 0 for key in keys])


def correlations(rows: Tensor) -> Tensor:
    """All pairwise correlations of 0/1 rows, in units of their standard deviation 1 / sqrt(n) under independence."""
    coefficients = torch.corrcoef(rows.double())
    above = torch.triu_indices(len(rows), len(rows), offset=1)
    return coefficients[above[0], above[1]] * rows.shape[1] ** 0.5


def assert_independent(rows: Tensor) -> None:
    z = correlations(rows)
    assert z.abs().max() < 5
    assert 0.9 < z.std() < 1.1
    assert z.mean().abs() < 4 / len(z) ** 0.5


def mix_by_definition(word: int) -> int:
    for shift, multiplier in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        word = (word ^ (word >> shift)) * multiplier % 2**32
    return word ^ (word >> 15)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_dropped_fraction_is_p_for_every_key(p):
    n = 4096
    dropped = 1 - masks(KEYS, n, p).double().mean(dim=1)
    sigma = (p * (1 - p) / n) ** 0.5
    assert (dropped - p).abs().max() < 4 * sigma
    assert (dropped.mean() - p).abs() < 4 * sigma / len(KEYS) ** 0.5


def test_masks_of_different_clients_are_independent():
    assert_independent(masks(KEYS))


def test_masks_of_different_steps_and_rounds_are_independent():
    times = itertools.product(range(1, 9), range(8))
    keys = torch.cat([dropout_keys(0, round_number, [3], step) for round_number, step in times])
    assert_independent(masks(keys))


def test_masks_of_different_layers_are_independent():
    assert_independent(torch.cat([masks(KEYS[:1], layer=layer) for layer in range(64)]))


@pytest.mark.parametrize("scale", [1, 2**31, 2**32, 2**57])
def test_masks_of_neighbouring_keys_are_independent(scale):
    assert_independent(masks(range(0, 64 * scale, scale)))


@pytest.mark.parametrize("lag", [1, 2, 8, 64, 1024])
def test_neighbouring_elements_are_dropped_independently(lag):
    rows = masks(KEYS, 8192).double() - 0.5
    correlation = (rows[:, lag:] * rows[:, :-lag]).mean() / 0.25
    assert abs(correlation) < 4 / (64 * (8192 - lag)) ** 0.5


def test_masks_follow_the_32_bit_hash_exactly():
    p, layer, key = 0.3, 5, (0x12345678 << 32) | 0xFEDCBA98
    low = mix_by_definition((key & 0xFFFFFFFF) ^ mix_by_definition(layer + 1))
    high = mix_by_definition((key >> 32) ^ low)
    kept = [mix_by_definition(mix_by_definition(i ^ low) ^ high) >= p * 2**32 for i in range(1000)]
    assert masks([key], 1000, p, layer)[0].tolist() == kept


def test_sequential_and_vmapped_clients_and_blocks_of_them_agree_bitwise():
    model = nn.Sequential(Dropout(0.3), nn.Tanh(), Dropout(0.5))
    convert_dropout(model)
    x = torch.randn(6, 4, 3, 5)

    def forward(key: Tensor, client_x: Tensor) -> Tensor:
        return functional_call(model, {"0.key": key, "2.key": key}, (client_x,))

    alone = torch.stack([forward(key, rows) for key, rows in zip(KEYS[:6], x, strict=True)])
    together = torch.vmap(forward)(KEYS[:6], x)
    blocks = torch.cat([torch.vmap(forward)(KEYS[rows], x[rows]) for rows in (slice(0, 4), slice(4, 6))])
    assert torch.equal(alone, together)
    assert torch.equal(alone, blocks)


def test_model_buffer_set_in_place_equals_stacked_key():
    layer = Dropout(0.4)
    layer.key.fill_(KEYS[7])
    x = torch.randn(50)
    assert torch.equal(layer(x), torch.vmap(lambda key: apply(layer, key, x))(KEYS)[7])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_mask_does_not_depend_on_dtype(dtype):
    dropped = apply(Dropout(0.3), KEYS[0], torch.ones(5000, dtype=dtype))
    assert dropped.dtype == dtype
    assert torch.equal(dropped != 0, masks(KEYS[:1], 5000, 0.3)[0])


def test_mask_does_not_depend_on_memory_format():
    x = torch.randn(4, 8, 5, 5)
    dropped = apply(Dropout(), KEYS[0], x.contiguous(memory_format=torch.channels_last))
    assert torch.equal(dropped, apply(Dropout(), KEYS[0], x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.gpu
def test_mask_on_cuda_equals_mask_on_cpu():
    x = torch.ones(3, 1000, device="cuda")
    on_cuda = torch.vmap(lambda key, rows: apply(Dropout(0.3), key, rows))(KEYS[:3].cuda(), x)
    assert torch.equal(on_cuda.cpu() != 0, masks(KEYS[:3], 1000, 0.3))


def test_the_global_generator_is_neither_read_nor_advanced():
    state = torch.get_rng_state()
    first = apply(Dropout(), KEYS[0], torch.ones(100))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(12345)
    assert torch.equal(apply(Dropout(), KEYS[0], torch.ones(100)), first)


def test_mean_is_preserved():
    layer = Dropout(0.25)
    mean = torch.stack([apply(layer, key, torch.full((4096,), 3.0)) for key in KEYS]).double().mean()
    sigma = 3 * (0.25 / 0.75 / (64 * 4096)) ** 0.5
    assert abs(mean - 3) < 4 * sigma


def test_gradient_is_mask_times_scale():
    x = torch.randn(1000, dtype=torch.float64, requires_grad=True)
    apply(Dropout(0.2), KEYS[0], x).sum().backward()
    assert torch.equal(x.grad, masks(KEYS[:1], 1000, 0.2)[0] * (1 / (1 - 0.2)))


@pytest.mark.parametrize("layer", [Dropout(0.7).eval(), Dropout(0.0)])
def test_eval_mode_and_p_zero_are_the_identity(layer):
    x = torch.randn(10)
    assert layer(x) is x


def test_p_one_gives_zeros_and_zero_gradient():
    x = torch.randn(10, requires_grad=True)
    dropped = Dropout(1.0)(x)
    dropped.sum().backward()
    assert not dropped.any()
    assert not x.grad.any()


@pytest.mark.parametrize(("dim", "shape"), [(1, (8, 32, 5)), (2, (8, 32, 5, 3)), (3, (8, 32, 2, 2, 2))])
def test_channelwise_dropout_keeps_or_drops_whole_channels(dim, shape):
    channels = (apply(Dropout(0.5, dim), KEYS[0], torch.ones(shape)) != 0).flatten(2)
    assert torch.equal(channels.all(dim=2), channels.any(dim=2))
    assert torch.equal(channels[..., 0].flatten(), masks(KEYS[:1], 8 * 32)[0])


@pytest.mark.filterwarnings("ignore:dropout")  # torch warns about such shapes
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Dropout1d, (8, 32)),
        (nn.Dropout2d, (8, 32)),
        (nn.Dropout2d, (8, 32, 5)),
        (nn.Dropout3d, (8, 32)),
        (nn.Dropout3d, (8, 32, 5)),
        (nn.Dropout3d, (8, 32, 5, 3)),
    ],
)
def test_inputs_of_few_dimensions_are_dropped_as_by_torch(layer, shape):
    def dimensions_of_the_mask(dropped):
        kept = (dropped != 0).double()
        return [dim for dim in range(len(shape)) if (kept.amax(dim) != kept.amin(dim)).any()]

    model = nn.Sequential(layer(0.5))
    expected = dimensions_of_the_mask(model(torch.ones(shape)))
    convert_dropout(model)
    assert dimensions_of_the_mask(apply(model[0], KEYS[0], torch.ones(shape))) == expected


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_p_outside_the_unit_interval_is_refused(p):
    with pytest.raises(ConfigurationError, match=r"Dropout.p: .* must be at least 0 and at most 1"):
        Dropout(p)


@pytest.mark.parametrize(
    ("dim", "message"),
    [
        (4, "Dropout.dim: 4 must be at least 0 and at most 3"),
        (1.5, "Dropout.dim must be at least 0 and a whole number, found 1.5"),
    ],
)
def test_unknown_dim_is_refused(dim, message):
    with pytest.raises(ConfigurationError, match=message):
        Dropout(0.5, dim=dim)


def test_key_is_not_part_of_the_state_dict():
    assert dict(Dropout().state_dict()) == {}


def test_keys_are_a_function_of_seed_round_client_and_step_alone():
    assert KEYS.dtype == torch.int64
    assert KEYS.min() >= 0
    assert torch.equal(dropout_keys(0, 1, [9, 2], 0), KEYS[[9, 2]])
    grid = [dropout_keys(seed, t, [0, 1, 2], step) for seed in (0, 1) for t in (1, 2) for step in (0, 1)]
    assert len(torch.cat(grid).unique()) == 24


def test_conversion_is_recursive_and_by_type():
    shared = nn.Dropout(0.3)
    model = nn.Sequential(
        nn.Dropout(0.1),
        nn.Sequential(nn.Linear(2, 2), nn.ModuleDict({"a": nn.Dropout1d(0.2), "b": nn.Dropout2d(0.4)})),
        shared,
        Dropout(0.6),
        nn.Dropout3d(0.5).eval(),
        shared,
    )
    assert convert_dropout(model) == 7
    layers = [module for module in model.modules() if isinstance(module, Dropout)]
    assert [layer.p for layer in layers] == [0.1, 0.2, 0.4, 0.3, 0.6, 0.5, 0.3]
    assert [layer.dim for layer in layers] == [0, 1, 2, 0, 0, 3, 0]
    assert [layer.layer for layer in layers] == list(range(7))
    assert [layer.training for layer in layers] == [True] * 5 + [False, True]
    assert not any(isinstance(module, nn.modules.dropout._DropoutNd) for module in model.modules())
    assert convert_dropout(model) == 7


class DroppingLinear(nn.Dropout):
    pass


@pytest.mark.parametrize(
    "layer",
    [
        nn.AlphaDropout(),
        nn.FeatureAlphaDropout(),
        DroppingLinear(),
        nn.RReLU(),
        nn.FractionalMaxPool2d(2, output_size=2),
        nn.MultiheadAttention(4, 2, dropout=0.1),
        nn.LSTM(2, 2, num_layers=2, dropout=0.1),
    ],
)
def test_other_stochastic_layers_are_refused_with_their_path(layer):
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(layer))
    with pytest.raises(ConfigurationError, match=f"'1.0' is a {type(layer).__name__}.*nn.Dropout"):
        convert_dropout(model)


def test_deterministic_attention_and_recurrence_are_accepted():
    assert convert_dropout(nn.Sequential(nn.MultiheadAttention(4, 2), nn.GRU(2, 2))) == 0
