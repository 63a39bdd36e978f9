//! Finding the first members in DNS: SRV records of a domain say where each is reached. etcd: `client/pkg/srv`.
//!
//! ```text
//! _etcd-server-ssl[-NAME]._tcp.DOMAIN    members reached by https
//! _etcd-server[-NAME]._tcp.DOMAIN        members reached by http
//! ```
//!
//! A record whose target is where this member says that it is reached stands for this member; the others have numbers for
//! names. Members are what their records say, not what they advertise: so all come to the same ids.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::bail;
use domain::base::{Name, Rtype};
use domain::rdata::Srv;
use domain::resolv::StubResolver;
use tracing::{info, warn};

use crate::config::{SrvDiscovery, Url};

/// Time to resolve one name. etcd has twice the five seconds that resolvers take for a server.
const RESOLVE_WITHIN: Duration = Duration::from_secs(10);

/// The services by scheme, in the order in which they are asked for.
const SERVICES: [(&str, &str); 2] = [("https", "etcd-server-ssl"), ("http", "etcd-server")];

/// The first members as DNS has them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// All, as the initial cluster has them: `name=URL,name=URL`.
    pub(super) initial_cluster: String,
    /// This one's URLs.
    pub(super) own_urls: Vec<Url>,
}

/// Looks the first members up. `name` is this member's, and `advertised` where it says that its peers reach it.
///
/// # Errors
/// When no member is found, this one is not among them, or one of its URLs is not.
pub(super) async fn look_up(
    settings: &SrvDiscovery,
    name: &str,
    advertised: &[Url],
) -> anyhow::Result<Found> {
    let mut own = BTreeMap::new();
    for url in advertised {
        let host = url.host();
        match resolve(host, url.port()).await {
            Ok(address) => own.insert(address, url.clone()),
            Err(reason) => bail!("--discovery-srv: {url} of --initial-advertise-peer-urls: {reason}"),
        };
    }
    let (mut nodes, mut failures) = (Vec::new(), Vec::new());
    for (scheme, service) in SERVICES {
        let service = match settings.service_name.as_str() {
            "" => service.to_owned(),
            suffix => format!("{service}-{suffix}"),
        };
        let found = match query(&service, &settings.domain).await {
            Ok(records) => assemble(&service, scheme, name, &own, records),
            Err(reason) => Err(reason),
        };
        match found {
            Ok(found) => {
                info!(service, domain = settings.domain, ?found, "found members in DNS");
                nodes.extend(found);
            }
            Err(reason) => failures.push(format!("error querying DNS SRV records for _{service} {reason}")),
        }
    }
    if nodes.is_empty() {
        bail!("error setting up initial cluster: {}", failures.join("; "));
    }
    for reason in failures {
        warn!(reason, "failed to resolve during SRV discovery");
    }
    check(nodes, name, &own)
}

/// Where a record says that a member is reached.
#[derive(Debug)]
struct Record {
    priority: u16,
    /// Without a final dot.
    target: String,
    port: u16,
    /// What the target resolves to, or why to nothing.
    address: Result<SocketAddr, String>,
}

/// A member that was found.
#[derive(Debug, PartialEq, Eq)]
struct Node {
    name: String,
    url: String,
    /// Of this member's: where that is.
    address: Option<SocketAddr>,
}

/// Makes members of the records of one service.
///
/// # Errors
/// When not one is left of them: why the last was left out.
fn assemble(
    service: &str,
    scheme: &str,
    name: &str,
    own: &BTreeMap<SocketAddr, Url>,
    mut records: Vec<Record>,
) -> Result<Vec<Node>, String> {
    records.sort_by(|one, other| {
        (one.priority, &one.target, one.port).cmp(&(other.priority, &other.target, other.port))
    });
    let mut nodes = Vec::new();
    let mut failure = "there is none".to_owned();
    let mut others = 0;
    for Record { target, port, address, .. } in records {
        let address = match address {
            Ok(address) => address,
            Err(reason) => {
                failure = format!("{target}:{port}: {reason}");
                continue;
            }
        };
        let host = if target.contains(':') { format!("[{target}]") } else { target };
        let url = format!("{scheme}://{host}:{port}");
        match own.get(&address) {
            Some(expected) if !expected.as_str().starts_with(&format!("{scheme}://")) => {
                failure = format!(
                    "bootstrap at {url} from DNS for {service} has scheme mismatch with expected peer {expected}"
                );
            }
            Some(_) => nodes.push(Node { name: name.to_owned(), url, address: Some(address) }),
            None => {
                nodes.push(Node { name: others.to_string(), url, address: None });
                others += 1;
            }
        }
    }
    if nodes.is_empty() { Err(failure) } else { Ok(nodes) }
}

/// Checks that this member is among those found, with all its URLs.
fn check(nodes: Vec<Node>, name: &str, own: &BTreeMap<SocketAddr, Url>) -> anyhow::Result<Found> {
    let mut own_urls = Vec::new();
    for node in nodes.iter().filter(|node| node.address.is_some()) {
        own_urls.push(Url::parse(&node.url).map_err(|error| anyhow::anyhow!("{}: {error}", node.url))?);
    }
    if own_urls.is_empty() {
        bail!("error setting up initial cluster: cannot find local etcd member {name:?} in SRV records");
    }
    let lacks = |address: &SocketAddr| nodes.iter().all(|node| node.address != Some(*address));
    if let Some((_, url)) = own.iter().find(|(address, _)| lacks(address)) {
        bail!("--initial-advertise-peer-urls has {url} but missing from the SRV records");
    }
    let texts: Vec<String> = nodes.iter().map(|node| format!("{}={}", node.name, node.url)).collect();
    Ok(Found { initial_cluster: texts.join(","), own_urls })
}

/// The records of a service, with what their targets resolve to.
async fn query(service: &str, domain: &str) -> Result<Vec<Record>, String> {
    let resolver = StubResolver::new();
    let asked = format!("_{service}._tcp.{}", domain.trim_end_matches('.'));
    let mut names = vec![asked.clone()];
    if !domain.ends_with('.') {
        let suffixes = resolver.options().search.as_slice().iter().map(ToString::to_string);
        names.extend(suffixes.filter(|suffix| suffix.len() > 1).map(|suffix| format!("{asked}.{suffix}")));
    }
    let mut failure = format!("lookup {asked}: no such host");
    for name in names {
        let answered = tokio::time::timeout(RESOLVE_WITHIN, query_name(&resolver, &name)).await;
        match answered.unwrap_or_else(|_| Err("no answer in time".to_owned())) {
            Ok(records) if records.is_empty() => {}
            Ok(records) => return Ok(records),
            Err(reason) => failure = format!("lookup {name}: {reason}"),
        }
    }
    Err(failure)
}

async fn query_name(resolver: &StubResolver, name: &str) -> Result<Vec<Record>, String> {
    let name = Name::vec_from_str(name).map_err(|error| error.to_string())?;
    let answer = resolver.query((name, Rtype::SRV)).await.map_err(|error| error.to_string())?;
    let section = answer.answer().map_err(|error| error.to_string())?;
    let mut records = Vec::new();
    for record in section.limit_to_in::<Srv<_>>() {
        let record = record.map_err(|error| error.to_string())?;
        let srv = record.data();
        let (target, port) = (srv.target().to_string(), srv.port());
        let target = target.trim_end_matches('.').to_owned();
        let address = resolve(&target, &port.to_string()).await;
        records.push(Record { priority: srv.priority(), target, port, address });
    }
    Ok(records)
}

/// Where a host is; of several addresses the first of the older kind, as in etcd.
async fn resolve(host: &str, port: &str) -> Result<SocketAddr, String> {
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let port = port.parse().map_err(|_| format!("port {port:?} is no number"))?;
    let looked_up = tokio::time::timeout(RESOLVE_WITHIN, tokio::net::lookup_host((host, port))).await;
    let found = looked_up.map_err(|_| "no answer in time".to_owned())?.map_err(|error| error.to_string())?;
    let found: Vec<SocketAddr> = found.collect();
    let first = found.iter().find(|address| address.is_ipv4()).or_else(|| found.first());
    first.copied().ok_or_else(|| format!("{host} has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(target: &str, address: &str) -> Record {
        let address = address.parse().map_err(|_| "no such host".to_owned());
        Record { priority: 10, target: target.to_owned(), port: 2380, address }
    }

    fn own(urls: &[&str]) -> BTreeMap<SocketAddr, Url> {
        let url = |url: &&str| (url.split_once("//").unwrap().1.parse().unwrap(), Url::parse(url).unwrap());
        urls.iter().map(url).collect()
    }

    fn found(service: (&str, &str), own_urls: &[&str], records: Vec<Record>) -> Result<String, String> {
        let nodes = assemble(service.1, service.0, "here", &own(own_urls), records)?;
        Ok(nodes.iter().map(|node| format!("{}={}", node.name, node.url)).collect::<Vec<_>>().join(","))
    }

    #[test]
    fn the_own_record_has_the_own_name_and_the_others_numbers() {
        let records = || {
            vec![
                record("m2.example.com", "10.0.0.2:2380"),
                record("m3.example.com", "unknown"),
                record("m1.example.com", "10.0.0.1:2380"),
                record("fe80::1", "[fe80::1]:2380"),
            ]
        };
        let plain = found(SERVICES[1], &["http://10.0.0.2:2380"], records());
        let expected = "0=http://[fe80::1]:2380,1=http://m1.example.com:2380,here=http://m2.example.com:2380";
        assert_eq!(plain.as_deref(), Ok(expected));
        let secure = found(SERVICES[0], &["http://10.0.0.2:2380"], records());
        assert_eq!(
            secure.as_deref(),
            Ok("0=https://[fe80::1]:2380,1=https://m1.example.com:2380"),
            "another scheme"
        );
    }

    #[test]
    fn when_none_is_left_the_last_reason_is_told() {
        let one = |address| vec![record("m2.example.com", address)];
        let refused = found(SERVICES[0], &["http://10.0.0.2:2380"], one("10.0.0.2:2380")).unwrap_err();
        assert_eq!(
            refused,
            "bootstrap at https://m2.example.com:2380 from DNS for etcd-server-ssl has scheme mismatch with expected \
             peer http://10.0.0.2:2380"
        );
        let refused = found(SERVICES[1], &[], one("unknown")).unwrap_err();
        assert_eq!(refused, "m2.example.com:2380: no such host");
    }

    #[test]
    fn this_member_must_be_found_with_all_its_urls() {
        let checked = |urls: &[&str]| {
            let own = own(urls);
            let records =
                vec![record("m1.example.com", "10.0.0.1:2380"), record("m2.example.com", "10.0.0.2:2380")];
            check(assemble("etcd-server", "http", "here", &own, records).unwrap(), "here", &own)
        };
        let found = checked(&["http://10.0.0.2:2380"]).unwrap();
        assert_eq!(found.initial_cluster, "0=http://m1.example.com:2380,here=http://m2.example.com:2380");
        assert_eq!(found.own_urls, [Url::parse("http://m2.example.com:2380").unwrap()]);
        let refused = checked(&["http://10.0.0.3:2380"]).unwrap_err().to_string();
        assert!(refused.contains("cannot find local etcd member \"here\" in SRV records"), "{refused}");
        let refused = checked(&["http://10.0.0.2:2380", "http://10.0.0.3:2380"]).unwrap_err().to_string();
        assert!(refused.contains("has http://10.0.0.3:2380 but missing"), "{refused}");
    }
}
