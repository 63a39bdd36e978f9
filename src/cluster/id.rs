//! Member and cluster ids: what etcd derives from the first membership, bit for bit.
//!
//! Clients, backups and `etcdutl` compare these numbers, so a member started with etcd's flags must come out with etcd's
//! ids:
//!
//! ```text
//! member id  = first 8 bytes, big-endian, of SHA-1(sorted peer URLs, joined without a separator ++ salt)
//! cluster id = first 8 bytes, big-endian, of SHA-1(member ids, ascending, 8 bytes big-endian each)
//! ```
//!
//! The salt keeps two clusters, or two lives of one address, apart: at bootstrap it is the cluster token, for a member
//! added later the decimal unix second of the request.
//!
//! Pure functions: no clock, no configuration, no storage.

use std::fmt;

use sha1::{Digest, Sha1};

/// Identifies one member for the life of its cluster; an id is never given out twice.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemberId(u64);

/// Identifies a cluster: the membership it was bootstrapped with.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClusterId(u64);

impl MemberId {
    /// Wraps an id that was stored or received.
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// Returns the number that goes into messages and records.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Derives the id of a member that is part of the first membership.
    ///
    /// etcd: `server/etcdserver/api/membership/member.go`
    pub fn at_bootstrap<'a>(peer_urls: impl IntoIterator<Item = &'a str>, cluster_token: &str) -> Self {
        Self::derive(peer_urls, cluster_token)
    }

    /// Derives the id of a member that is added to a running cluster, from the unix time of the request.
    pub fn when_added<'a>(peer_urls: impl IntoIterator<Item = &'a str>, unix_seconds: i64) -> Self {
        Self::derive(peer_urls, &unix_seconds.to_string())
    }

    fn derive<'a>(peer_urls: impl IntoIterator<Item = &'a str>, salt: &str) -> Self {
        let mut urls: Vec<&str> = peer_urls.into_iter().collect();
        urls.sort_unstable();
        let mut sha = Sha1::new();
        for url in urls {
            sha.update(url.as_bytes());
        }
        sha.update(salt.as_bytes());
        Self(leading_u64(sha))
    }
}

impl ClusterId {
    /// Wraps an id that was stored or received.
    pub const fn new(id: u64) -> Self {
        Self(id)
    }

    /// Returns the number that goes into messages and records.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Derives the id of the cluster from the members it is bootstrapped with, in any order.
    ///
    /// etcd: `server/etcdserver/api/membership/cluster.go`
    pub fn at_bootstrap(members: impl IntoIterator<Item = MemberId>) -> Self {
        let mut ids: Vec<MemberId> = members.into_iter().collect();
        ids.sort_unstable();
        let mut sha = Sha1::new();
        for id in ids {
            sha.update(id.0.to_be_bytes());
        }
        Self(leading_u64(sha))
    }
}

fn leading_u64(sha: Sha1) -> u64 {
    let digest = sha.finalize();
    let head = digest.first_chunk::<8>().expect("a SHA-1 digest has 20 bytes");
    u64::from_be_bytes(*head)
}

/// Lower-case hexadecimal without padding, as etcd prints ids.
impl fmt::Display for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// Lower-case hexadecimal without padding, as etcd prints ids.
impl fmt::Display for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl fmt::Debug for MemberId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MemberId({self})")
    }
}

impl fmt::Debug for ClusterId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClusterId({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::{ClusterId, MemberId};

    /// What etcd gave for this URL and token, seen on a running server.
    #[test]
    fn a_single_member_gets_etcds_ids() {
        let member = MemberId::at_bootstrap(["http://127.0.0.1:23800"], "etcd-cluster");
        assert_eq!(member.get(), 3_319_814_642_761_637_952);
        assert_eq!(member.to_string(), "2e1259d415f2a040");
        assert_eq!(ClusterId::at_bootstrap([member]).get(), 324_952_591_200_643_719);
    }

    /// The ids every default etcd shows: 8e9e05c52164694d in cluster cdf818194e3a8c32.
    #[test]
    fn the_default_member_gets_the_well_known_ids() {
        let member = MemberId::at_bootstrap(["http://localhost:2380"], "etcd-cluster");
        assert_eq!(member.to_string(), "8e9e05c52164694d");
        assert_eq!(ClusterId::at_bootstrap([member]).to_string(), "cdf818194e3a8c32");
    }

    #[test]
    fn the_order_of_urls_and_members_does_not_matter() {
        let a = MemberId::at_bootstrap(["http://10.0.0.1:2380", "http://10.0.0.2:2380"], "t");
        let b = MemberId::at_bootstrap(["http://10.0.0.2:2380", "http://10.0.0.1:2380"], "t");
        assert_eq!(a, b);
        let c = MemberId::at_bootstrap(["http://10.0.0.3:2380"], "t");
        assert_eq!(ClusterId::at_bootstrap([a, c]), ClusterId::at_bootstrap([c, b]));
    }

    #[test]
    fn the_token_and_the_time_keep_members_apart() {
        let url = ["http://127.0.0.1:2380"];
        assert_ne!(MemberId::at_bootstrap(url, "one"), MemberId::at_bootstrap(url, "two"));
        assert_ne!(MemberId::when_added(url, 1), MemberId::when_added(url, 2));
        assert_eq!(MemberId::when_added(url, 1), MemberId::at_bootstrap(url, "1"));
    }

    #[test]
    fn small_ids_print_without_padding() {
        assert_eq!(MemberId::new(0x0a).to_string(), "a");
        assert_eq!(format!("{:?}", ClusterId::new(0xbeef)), "ClusterId(beef)");
    }
}
