"""A link turns bytes and exchanges into time."""

import math

import pytest

from fl_lightning import ConfigurationError
from fl_lightning.callbacks.observers.network_link import NetworkLink
from fl_lightning.console import time_in_words


def test_a_megabyte_takes_eight_seconds_at_one_megabit_per_second():
    link = NetworkLink(upload_mbps=1, download_mbps=4, latency_ms=0)
    assert link.seconds(1_000_000, 0, 1) == pytest.approx(8)
    assert link.seconds(0, 1_000_000, 1) == pytest.approx(2)


def test_exchanges_wait_one_after_the_other():
    link = NetworkLink(latency_ms=50)
    assert link.seconds(0, 0, 58) == pytest.approx(2.9)
    assert link.seconds(0, 0, 58) - link.seconds(0, 0, 1) == pytest.approx(57 * 0.05)


def test_local_steps_take_time_only_where_their_time_is_known():
    assert NetworkLink().seconds(0, 0, 0, local_steps=20) == 0
    assert NetworkLink(seconds_per_local_step=0.3).seconds(0, 0, 0, local_steps=20) == pytest.approx(6)


def test_fedtan_of_resnet20_waits_far_longer_than_its_bytes_say():
    fedavg, fedtan = 4 * 271_098, 4 * (271_098 + 2 * 1_376)
    fast = NetworkLink(upload_mbps=100, download_mbps=100)
    assert fedtan / fedavg < 1.011
    assert fast.seconds(fedtan, fedtan, 58) > 10 * fast.seconds(fedavg, fedavg, 1)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("upload_mbps", 0),
        ("download_mbps", -1),
        ("upload_mbps", math.inf),
        ("latency_ms", -1),
        ("latency_ms", math.nan),
        ("seconds_per_local_step", -0.1),
    ],
)
def test_a_number_out_of_range_is_refused_by_name(setting, value):
    with pytest.raises(
        ConfigurationError, match=rf"NetworkLink\.{setting}: {value} must be .* and finite, such as"
    ):
        NetworkLink(**{setting: value})


def test_an_ideal_network_costs_no_latency():
    assert NetworkLink(latency_ms=0).seconds(0, 0, 1000) == 0


def test_a_link_says_what_it_is():
    assert str(NetworkLink()) == "2 Mbit/s up, 6 down, 50 ms round trip"
    assert str(NetworkLink(seconds_per_local_step=0.01)).endswith("round trip, 0.01 s a local step")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (90, "90 s"), (876.47, "14.6 min"), (7200, "2 h"), (1e6, "11.6 days")]
)
def test_a_time_is_told_in_a_unit_that_fits(seconds, words):
    assert time_in_words(seconds) == words
