"""Archives that a data set is fetched as."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import URLError

from torch.hub import download_url_to_file

from fl_lightning.errors import ConfigurationError


def fetch_archive(url: str, md5: str, target: Path) -> None:
    """Download an archive, with its progress on the terminal, check it, and unpack its only folder as ``target``.

    The folder has its name once it is complete: what is broken off leaves nothing.

    Args:
        url: The archive's address.
        md5: The MD5 of the archive.
        target: The folder that it becomes; its parent exists.

    Raises:
        ConfigurationError: The archive cannot be fetched, is another one or cannot be unpacked there.
    """
    from torchvision.datasets.utils import check_md5, extract_archive  # takes seconds to import

    try:
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
            archive, unpacked = Path(folder, Path(url).name), Path(folder, "unpacked")
            download_url_to_file(url, str(archive))
            if not check_md5(str(archive), md5):
                raise ValueError(f"it has another MD5 than {md5}")
            extract_archive(str(archive), str(unpacked))
            (only,) = unpacked.iterdir()
            os.replace(only, target)
    except (URLError, RuntimeError, OSError, ValueError) as error:
        raise ConfigurationError(
            f"download: {url} could not be fetched into {target} ({getattr(error, 'reason', error)}); try again, or unpack it "
            "there by hand"
        ) from error
