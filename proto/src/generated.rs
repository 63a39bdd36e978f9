//! What `build.rs` wrote, put into modules.

#![allow(missing_docs, clippy::all, clippy::allow_attributes_without_reason, reason = "generated")]

/// Keys and events.
pub mod mvccpb {
    include!(concat!(env!("OUT_DIR"), "/messages/mvccpb.rs"));
}

/// Users, roles and permissions.
pub mod authpb {
    include!(concat!(env!("OUT_DIR"), "/messages/authpb.rs"));
}

/// KV, Watch, Lease, Cluster, Maintenance and Auth.
pub mod etcdserverpb {
    include!(concat!(env!("OUT_DIR"), "/messages/etcdserverpb.rs"));
}

/// The lock service.
pub mod v3lockpb {
    include!(concat!(env!("OUT_DIR"), "/messages/v3lockpb.rs"));
}

/// The election service.
pub mod v3electionpb {
    include!(concat!(env!("OUT_DIR"), "/messages/v3electionpb.rs"));
}

/// The standard health service, `grpc.health.v1`.
pub mod health {
    include!(concat!(env!("OUT_DIR"), "/messages/grpc.health.v1.rs"));
}

/// What skeg stores and sends to peers.
pub mod skegpb {
    include!(concat!(env!("OUT_DIR"), "/messages/skegpb.rs"));
}

/// Service traits and their tonic services, one module per service.
pub mod server {
    include!(concat!(env!("OUT_DIR"), "/server/etcdserverpb.rs"));
    include!(concat!(env!("OUT_DIR"), "/server/v3lockpb.rs"));
    include!(concat!(env!("OUT_DIR"), "/server/v3electionpb.rs"));
    include!(concat!(env!("OUT_DIR"), "/server/grpc.health.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/server/skegpb.rs"));
}

/// Clients, one module per service, for any transport that is a tower service.
pub mod client {
    include!(concat!(env!("OUT_DIR"), "/client/etcdserverpb.rs"));
    include!(concat!(env!("OUT_DIR"), "/client/v3lockpb.rs"));
    include!(concat!(env!("OUT_DIR"), "/client/v3electionpb.rs"));
    include!(concat!(env!("OUT_DIR"), "/client/grpc.health.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/client/skegpb.rs"));
}
