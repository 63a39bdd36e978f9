//! The cluster as it is replicated: who the members are and how they are named.

pub mod id;
