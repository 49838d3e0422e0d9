"""The parallel jobs of stages on a Dask cluster, which may span hosts: group `jobs` of the configuration.

`client.py` runs the items of a `parallel_map` as tasks, `dask_worker.py` is what a Dask worker does with them, and
`start.py` starts clusters. Dask is imported with the first map, so nobody else needs it.
"""
