"""The Ray layer: the driver of a run, its stage groups, and the workers that hold the members."""
