"""All options that users can set. Each one is defined once.

An option is a field: its name, type, default, and an Option with its group, help, flags and
environment variables. The command line, the environment, the table in the documents, and the
settings of replicas and routers are derived from it. The class of an option decides which processes
receive it: for example, replicas receive ReplicaOptions. Serve restarts the replicas only if one of
the ReplicaOptions changes.
"""
