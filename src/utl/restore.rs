//! `snapshot restore`: a file of etcd's, taken from etcd or from here, becomes a data directory.
//!
//! ```text
//! arguments, members ─> DATA-DIR/restoring ─> store, log, identity ─> one rename
//! file ─ checksum, on a thread of its own ───────────────┘ before it
//! ```

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::thread;

use sha2::{Digest, Sha256};

use super::arguments::Invocation;
use super::{Failure, check_exists};
use crate::cluster::id::{ClusterId, MemberId};
use crate::config::{self, FirstMembership, Url};
use crate::proto::skegpb::Member;
use crate::raft;
use crate::storage::Restoring;
use crate::storage::data_dir::Identity;
use crate::storage::etcd::{self, Beginning, EtcdFile, Imported};

/// Bytes of the checksum behind a snapshot.
const SUM_BYTES: u64 = 32;
/// Pages are a multiple of this, so what is over says if there is a checksum.
const SECTOR_BYTES: u64 = 512;
/// Bytes that are read at a time.
const READ_BYTES: usize = 1 << 20;

/// Runs the command.
pub(super) fn restore(invocation: &Invocation) -> Result<String, Failure> {
    let [path] = &invocation.positional[..] else {
        return Err(Failure::bad_arguments("snapshot restore requires exactly one argument"));
    };
    let bump_revision = u64::try_from(invocation.number("bump-revision")).map_err(Failure::new)?;
    if (bump_revision > 0) != invocation.is_on("mark-compacted") {
        return Err(Failure::bad_arguments("--mark-compacted required if --revision-bump > 0"));
    }
    let name = invocation.text("name");
    let data_dir = match invocation.path("data-dir") {
        empty if empty.as_os_str().is_empty() => PathBuf::from(format!("{name}.etcd")),
        given => given,
    };
    let wal_dir = Some(invocation.path("wal-dir")).filter(|dir| !dir.as_os_str().is_empty());
    let advertised = Url::parse_list(invocation.text("initial-advertise-peer-urls")).map_err(Failure::new)?;
    let first = config::first_membership(name, invocation.text("initial-cluster"), Some(&advertised))
        .map_err(Failure::new)?;
    let (identity, members) = identify(&first, invocation.text("initial-cluster-token"))?;

    check_exists(path)?;
    let file = EtcdFile::open(Path::new(path)).map_err(Failure::new)?;
    let restoring = Restoring::begin(&data_dir, wal_dir.as_deref()).map_err(Failure::new)?;
    let checks_sum = !invocation.is_on("skip-hash-check");
    if !checks_sum {
        // Nothing else says that the pages are whole.
        file.bolt().check().map_err(Failure::new)?;
    }
    let imported = thread::scope(|scope| {
        let checking = checks_sum.then(|| scope.spawn(|| check_sum(Path::new(path))));
        let filled = fill(&restoring, &file, identity, members, bump_revision);
        // A wrong sum is the reason, whatever else was found.
        match checking.map(thread::ScopedJoinHandle::join) {
            Some(Ok(checked)) => checked?,
            Some(Err(_)) => return Err(Failure::new("the thread that reads the checksum has panicked")),
            None => {}
        }
        filled
    })?;
    restoring.finish().map_err(Failure::new)?;
    let compacted = if imported.compacted < 0 {
        "never compacted".to_owned()
    } else {
        format!("compacted at {}", imported.compacted)
    };
    let auth = if imported.auth_enabled { "; authentication is on in it" } else { "" };
    Ok(format!(
        "restored {} records at revision {}, {compacted}, in {}{auth}\n",
        imported.records,
        imported.revision,
        data_dir.display()
    ))
}

/// Who this member and all the others are. etcd: `membership.NewClusterFromURLsMap`.
fn identify(first: &FirstMembership, token: &str) -> Result<(Identity, Vec<Member>), Failure> {
    let members: Vec<Member> = first
        .members
        .iter()
        .map(|member| {
            let peer_urls: Vec<String> = member.peer_urls.iter().map(|url| url.as_str().to_owned()).collect();
            let id = MemberId::at_bootstrap(peer_urls.iter().map(String::as_str), token).get();
            Member { id, name: member.name.clone(), peer_urls, ..Member::default() }
        })
        .collect();
    let mut ids: Vec<u64> = members.iter().map(|member| member.id).collect();
    let cluster_id = ClusterId::at_bootstrap(ids.iter().copied().map(MemberId::new)).get();
    ids.sort_unstable();
    ids.dedup();
    let here = members.iter().find(|member| member.name == first.local.name);
    match here {
        Some(here) if ids.len() == members.len() => {
            let member_id = here.id;
            // A name is published by the member itself.
            Ok((Identity { member_id, cluster_id }, members))
        }
        _ => Err(Failure::new("two members of --initial-cluster have the same peer URLs")),
    }
}

/// Puts store, log and identity into a directory that is not a data directory yet.
fn fill(
    restoring: &Restoring,
    file: &EtcdFile,
    identity: Identity,
    members: Vec<Member>,
    bump_revision: u64,
) -> Result<Imported, Failure> {
    let data_dir = restoring.inner();
    let position = raft::first_position(&members).map_err(Failure::new)?;
    let (applied, membership) = (position.applied, position.membership);
    let beginning = Beginning { members, applied, membership, bump_revision };
    let generations = data_dir.generations().map_err(Failure::new)?;
    let generation = generations.reserve();
    let imported = etcd::import(file, &generation.dir, &beginning).map_err(Failure::new)?;
    generations.make_current(&generation, position.index).map_err(Failure::new)?;
    raft::begin_log(data_dir.log_dir(), identity.member_id).map_err(Failure::new)?;
    data_dir.claim(identity).map_err(Failure::new)?;
    Ok(imported)
}

/// Compares a file with the checksum behind it.
pub(super) fn check_sum(path: &Path) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::new(format!("read {}: {error}", path.display()));
    let mut file = File::open(path).map_err(failed)?;
    let size = file.metadata().map_err(failed)?.len();
    if size % SECTOR_BYTES != SUM_BYTES {
        return Err(Failure::new("snapshot missing hash but --skip-hash-check=false"));
    }
    let mut expected = Vec::new();
    file.seek(SeekFrom::Start(size - SUM_BYTES)).map_err(failed)?;
    file.read_to_end(&mut expected).map_err(failed)?;
    file.seek(SeekFrom::Start(0)).map_err(failed)?;
    let mut rest = file.take(size - SUM_BYTES);
    let mut sum = Sha256::new();
    let mut buffer = vec![0; READ_BYTES];
    loop {
        match rest.read(&mut buffer).map_err(failed)? {
            0 => break,
            count => sum.update(&buffer[..count]),
        }
    }
    let found = sum.finalize();
    if expected == found[..] {
        return Ok(());
    }
    let numbers = |bytes: &[u8]| bytes.iter().map(u8::to_string).collect::<Vec<_>>().join(" ");
    Err(Failure::new(format!("expected sha256 [{}], got [{}]", numbers(&expected), numbers(&found))))
}
