"""Stage `report`: RESULTS.md, index.html and plots, made only from the files in exp/<corpus>."""
