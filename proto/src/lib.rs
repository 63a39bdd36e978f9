//! The etcd 3.7 wire contract and skeg's own peer and log messages.
