//! Compiles the `.proto` files without protoc and generates Rust from them in three passes: the
//! messages, the servers and the clients. The last two take their messages from the first.

use std::path::{Path, PathBuf};
use std::{env, error::Error, fs};

use prost_build::Config;
use prost_types::{DescriptorProto, FileDescriptorSet};

const PROTO_DIR: &str = "proto";

const FILES: &[&str] = &[
    "etcd/auth.proto",
    "etcd/cluster.proto",
    "etcd/election.proto",
    "etcd/header.proto",
    "etcd/kv.proto",
    "etcd/lease.proto",
    "etcd/lock.proto",
    "etcd/maintenance.proto",
    "etcd/mvcc.proto",
    "etcd/permission.proto",
    "etcd/watch.proto",
    "grpc/health.proto",
    "skeg/command.proto",
    "skeg/log.proto",
    "skeg/peer.proto",
    "skeg/record.proto",
];

/// Where the messages of each package with services, or used by them, are in this crate.
const MODULES: &[(&str, &str)] = &[
    (".etcdserverpb", "crate::etcdserverpb"),
    (".mvccpb", "crate::mvccpb"),
    (".authpb", "crate::authpb"),
    (".v3lockpb", "crate::v3lockpb"),
    (".v3electionpb", "crate::v3electionpb"),
    (".grpc.health.v1", "crate::health"),
    (".skegpb", "crate::skegpb"),
];

/// Responses that the server writes from storage slices: its traits take them encoded.
const ENCODED: &[&str] = &[".etcdserverpb.RangeStreamResponse", ".etcdserverpb.WatchResponse"];

/// Messages that hold passwords, their hashes or tokens: the crate writes their `Debug` by hand.
const SECRET: &[&str] = &[
    ".authpb.User",
    ".etcdserverpb.AuthenticateRequest",
    ".etcdserverpb.AuthenticateResponse",
    ".etcdserverpb.AuthUserAddRequest",
    ".etcdserverpb.AuthUserChangePasswordRequest",
    ".skegpb.AuthIssue",
    ".skegpb.UserAdd",
    ".skegpb.UserChangePassword",
];

/// The service whose calls of one message are read and written by hand: its server has the streams alone.
const STREAMS_ALONE: &str = "KV";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed={PROTO_DIR}");
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    let mut descriptors = protox::compile(FILES, [PROTO_DIR])?;
    write_descriptors(&descriptors, &out.join("descriptors.bin"))?;
    for message in descriptors.file.iter_mut().flat_map(|file| &mut file.message_type) {
        rename_url_fields(message);
    }

    let messages = subdirectory(&out, "messages")?;
    config().skip_debug(SECRET).out_dir(messages).compile_fds(descriptors.clone())?;

    let mut servers = config();
    take_messages_from_crate(&mut servers);
    for message in ENCODED {
        servers.extern_path(*message, "crate::wire::Encoded");
    }
    tonic_prost_build::configure()
        .build_client(false)
        .build_transport(false)
        .out_dir(subdirectory(&out, "server")?)
        .compile_fds_with_config(without_calls_by_hand(&descriptors), servers)?;

    let mut clients = config();
    take_messages_from_crate(&mut clients);
    tonic_prost_build::configure()
        .build_server(false)
        .build_transport(false)
        .out_dir(subdirectory(&out, "client")?)
        .compile_fds_with_config(descriptors, clients)?;
    Ok(())
}

/// Writes the descriptors as declared, without comments and positions.
fn write_descriptors(descriptors: &FileDescriptorSet, path: &Path) -> Result<(), Box<dyn Error>> {
    let mut bare = descriptors.clone();
    for file in &mut bare.file {
        file.source_code_info = None;
    }
    fs::write(path, prost::Message::encode_to_vec(&bare))?;
    Ok(())
}

fn without_calls_by_hand(descriptors: &FileDescriptorSet) -> FileDescriptorSet {
    let mut descriptors = descriptors.clone();
    for service in descriptors.file.iter_mut().flat_map(|file| &mut file.service) {
        if service.name() == STREAMS_ALONE {
            service.method.retain(|method| method.client_streaming() || method.server_streaming());
        }
    }
    descriptors
}

/// Makes `peerURLs` the Rust field `peer_urls`, where the usual rules give `peer_ur_ls`. Numbers and
/// types, and so the bytes on the wire, stay.
fn rename_url_fields(message: &mut DescriptorProto) {
    for field in &mut message.field {
        let name = field.name.take().unwrap_or_default();
        field.name = Some(name.replace("URLs", "Urls"));
    }
}

/// Settings shared by the passes: bytes are slices of the received buffer, maps have one order.
fn config() -> Config {
    let mut config = Config::new();
    config.bytes(["."]).btree_map(["."]);
    config
}

fn take_messages_from_crate(config: &mut Config) {
    for (package, module) in MODULES {
        config.extern_path(*package, *module);
    }
}

fn subdirectory(out: &Path, name: &str) -> Result<PathBuf, Box<dyn Error>> {
    let path = out.join(name);
    fs::create_dir_all(&path)?;
    Ok(path)
}
