"""The partitions of the audit can be made again."""

import audit
import pytest


def saved(seed, clients=5):
    parts = [{"id": str(client), "train": [client]} for client in range(clients)]
    return {"overlap": False, "clients": parts, "origin": {"settings": {"seed": seed}}}


@pytest.mark.parametrize("seed", [0, 1])
def test_every_client_gets_ten_images_of_each_of_the_eight_other_classes(seed):
    before, after = saved(seed), audit.with_ten_images(saved(seed))
    assert after["overlap"]
    for old, new in zip(before["clients"], after["clients"], strict=True):
        assert new["id"] == old["id"]
        assert new["train"] == sorted({*new["train"]})
        assert {*old["train"]} < {*new["train"]}
        assert len(new["train"]) == 1 + 80


def test_another_seed_has_no_such_images():
    with pytest.raises(KeyError, match="7"):
        audit.with_ten_images(saved(7))
