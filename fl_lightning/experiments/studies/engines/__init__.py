"""Where cells are computed: engines that run the same command line for each."""
