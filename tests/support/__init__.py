"""What tests have in common, by what a test is about.

Every test
    helpers: federations of ``fl_lightning.testing``, ``federated_run``, observers of rows, states and clients
    in_ranks: a function in several processes that are ranks of each other
    outcomes: what training leaves behind, to compare executors by
    recorded_calls: graphs without a GPU
    fake_gpu: a CUDA device without numbers

Methods
    contract: every method with the settings in which it is tested
    broken_callbacks: callbacks that are each wrong in one way
    added_layers: methods that add layers with trainable parameters
    private: federations whose batches are, or count as, Poisson samples
    readme_code: the methods of the README and of the pages on one's own methods

LightningModules and data
    lightning_sites: a LightningModule and data modules of sites, as a user of Lightning writes them
    plain_lightning: clients and rounds by Lightning alone, as a reference
    layouts: small data sets in the layouts of Tiny-ImageNet, LEAF and FedDrive
    colour_folders: small images in class folders
    street_scenes: small images in the layout of Cityscapes

The command line and runs
    command_line: a tiny federation as a user starts it
    naming: what a command line would run, without running it
    trained_models: runs of three rounds, and what their models make of new files
    written_runs: run directories and studies that were written, not computed
    wandb_files: offline runs of W&B, read back
    sweeps: what the agent of a W&B sweep starts

Studies
    cells: a study of two cells, of which one waits
    slurm_cluster: the Slurm of this machine
    study_in_process: a study whose cells are computed in this process
    study_frames: results of studies, made from rows of their tables
    untrained_cells: cells that are never trained

Pages
    pages: the README and the pages below ``docs/``

Plugins of pytest
    chosen_rows: which rows are slow, and which nightly ones run
    cpu_seconds: the option ``--cpu``
    reached_lines: which lines a test runs, for ``tests/mutants.py``
"""
