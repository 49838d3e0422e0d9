"""Teams of real processes: collectives by torch.distributed, messages by ZeroMQ.

launcher         starts and monitors a team: supervisor and node agents
worker_process   environment, start and end of worker processes
connect          joins the team that the environment describes
team             one learner's `Team`
torch_group      synchronous backend: collectives and control plane by torch.distributed
rendezvous       how synchronous learners find each other
coordinator      asynchronous control plane: the supervisor's front of `distributed.control_plane`
control_client   asynchronous backend: requests to the supervisor
messaging        point-to-point messages: sockets and connections
message_queues   outgoing and incoming messages, and their buffers
wire             header of every frame
membership       live learners and their addresses
event_loop       the communication thread, and what tasks wait on
step_watch       ends a learner that hangs in a batch
security         keys, sockets, rejected connections
fault_injection  injected faults and emulated computing time
"""
