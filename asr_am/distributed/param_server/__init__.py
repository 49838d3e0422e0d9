"""Parameter servers: the parts that `ps_sync`, `ps_async` and `psp` share."""
