"""The algorithms, one file each, behind the interface of `asr_am.distributed.strategy`."""
