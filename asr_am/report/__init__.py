"""Stage `report`: RESULTS.md and plots, made from the files of exp/<corpus> and from nothing else."""
