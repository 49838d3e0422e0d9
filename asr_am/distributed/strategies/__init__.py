"""The algorithms: one file each, all against the interface in `asr_am.distributed.strategy`."""
