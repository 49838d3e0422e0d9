"""Stage `report`: RESULTS.md and plots, made only from the files in exp/<corpus>."""
