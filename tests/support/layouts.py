"""Small data sets in the layouts of Tiny-ImageNet, LEAF's FEMNIST and FedDrive's split files."""

import json
import shutil

import numpy as np


def write_tiny_imagenet(root, folders):
    """Tiny-ImageNet's layout with the images of class folders (``train/<class>/*``, ``test/<class>/*``)."""
    for own in (folders / "train").iterdir():
        shutil.copytree(own, root / "train" / own.name / "images")
    (root / "val" / "images").mkdir(parents=True)
    lines = []
    for path in (folders / "test").glob("*/*"):
        name = f"{path.parent.name}_{path.name}"
        shutil.copy(path, root / "val" / "images" / name)
        lines.append(f"{name}\t{path.parent.name}\t0\t0\t7\t7\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))


def leaf_writer(rng, count, labels):
    """The images of one of LEAF's writers, whose labels go round."""
    return {
        "x": rng.random((count, 784)).round(4).tolist(),
        "y": [labels[i % len(labels)] for i in range(count)],
    }


def write_femnist(root, writers, images):
    """Writers with equally many images, all of them in one file for each part."""
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        users = {f"f{number}": leaf_writer(rng, images, [number, 61]) for number in range(writers)}
        (root / split).mkdir(parents=True)
        (root / split / "all_data.json").write_text(json.dumps({"user_data": users}))


def write_feddrive(folder, scenes, images):
    """Split files for scenes in Cityscapes' layout: users of one city with so many images each, a file for each city."""
    folder.mkdir(parents=True)
    for number, city in enumerate(sorted((scenes / "leftImg8bit" / "train").iterdir())):
        x = sorted(f"train/{city.name}/{path.name}" for path in city.iterdir())
        parts = [x[start : start + images] for start in range(0, len(x) - images + 1, images)]
        users = {
            f"{city.name}{k}": {
                "x": own,
                "y": [name.replace("leftImg8bit", "gtFine_labelIds") for name in own],
            }
            for k, own in enumerate(parts)
        }
        (folder / f"all_data_{number}.json").write_text(json.dumps({"user_data": users}))
