"""Parameter servers: what `ps_sync`, `ps_async` and `psp` share."""
