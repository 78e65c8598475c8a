"""W&B as a test may use it: without the user's key, settings and caches."""

import os

import pytest
import torch


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """A W&B session of one file of tests alone: no key, no settings and no caches of the user's."""
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        patch.setenv("NETRC", str(home / "netrc"))
        for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            patch.setenv(name, str(home))
        import wandb

        wandb.teardown()  # of a session that earlier tests of this process began, which keeps their mode
        yield home
        wandb.teardown()


@pytest.fixture
def offline(session, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return session
