"""Teams of real processes: collectives by torch.distributed and messages by ZeroMQ, or both by MPI.

launcher         starts a team: gives supervisor and node agents their sockets, processes and clock
worker_process   environment, start and end of worker processes
fork_server      a process that has imported what learners need, and forks them
connect          joins the team that the environment describes
team             one learner's `Team`
torch_group      synchronous backend: collectives and control plane by torch.distributed
rendezvous       how synchronous learners find each other
control_server   the supervisor's socket
control_client   a learner's connection to the supervisor
messaging        point-to-point messages: sockets and connections
message_queues   outgoing and incoming messages
message_buffers  their memory, shared by learners of one host
wire             header of every frame
mpi_environment  variables of mpirun
mpi_link         MPI: its start, frames and requests
mpi_collectives  collectives over MPI
mpi_team         the team of processes that mpirun has started
event_loop       the communication thread, and what tasks wait on
step_watch       ends a learner that hangs in a batch
security         keys, sockets, rejected connections
fault_injection  injected faults and emulated computing time
"""
