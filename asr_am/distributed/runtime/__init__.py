"""Teams of real processes: collectives by torch.distributed, mail by ZeroMQ, and who starts and watches them."""
