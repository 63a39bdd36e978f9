//! Who may ask by plain HTTP: host names, against DNS rebinding, and origins of web pages.

use std::collections::BTreeSet;

use http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN, HOST, HeaderMap,
    HeaderValue, ORIGIN,
};
use http::{Request, Response, StatusCode};
use tonic::body::Body;
use tracing::warn;

use super::answer;

const METHODS: HeaderValue = HeaderValue::from_static("POST, GET, OPTIONS, PUT, DELETE");
const HEADERS: HeaderValue = HeaderValue::from_static("accept, content-type, authorization");

/// The names that are let in; an absent set lets all in.
pub(super) struct Access {
    hosts: Option<BTreeSet<String>>,
    origins: Option<BTreeSet<String>>,
}

/// The origin that a response is to allow.
pub(super) struct AllowedOrigin(Option<HeaderValue>);

impl Access {
    /// An empty list, or `*` in it, lets all in.
    pub(super) fn new(hosts: &[String], origins: &[String]) -> Access {
        let set = |names: &[String]| {
            let all = names.is_empty() || names.iter().any(|name| name == "*");
            (!all).then(|| names.iter().cloned().collect())
        };
        Access { hosts: set(hosts), origins: set(origins) }
    }

    /// Refuses a request to a host name that is not ours, and finds the origin to allow.
    pub(super) fn check(&self, request: &Request<()>) -> Result<AllowedOrigin, Box<Response<Body>>> {
        if let Some(hosts) = &self.hosts {
            let host = host_name(request);
            if !hosts.contains(host) {
                warn!(host, "rejecting HTTP request to prevent DNS rebinding attacks");
                return Err(Box::new(answer::text(StatusCode::MISDIRECTED_REQUEST, unknown_host(host))));
            }
        }
        let origin = match &self.origins {
            None => Some(HeaderValue::from_static("*")),
            Some(origins) => {
                let listed =
                    |origin: &&HeaderValue| origin.to_str().is_ok_and(|origin| origins.contains(origin));
                request.headers().get(ORIGIN).filter(listed).cloned()
            }
        };
        Ok(AllowedOrigin(origin))
    }
}

impl AllowedOrigin {
    pub(super) fn put_on(self, headers: &mut HeaderMap) {
        if let Some(origin) = self.0 {
            headers.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, HEADERS);
        }
    }
}

/// The host without port and brackets; whole if it has no port.
fn host_name(request: &Request<()>) -> &str {
    let named = request.headers().get(HOST).and_then(|host| host.to_str().ok());
    let host = request.uri().authority().map(|authority| authority.as_str()).or(named).unwrap_or_default();
    match host.rsplit_once(':') {
        Some((name, _)) if name.starts_with('[') && name.ends_with(']') => &name[1..name.len() - 1],
        Some((name, _)) if !name.contains([':', '[', ']']) => name,
        _ => host,
    }
}

fn unknown_host(host: &str) -> String {
    format!(
        "skeg got the request, but does not know the host name in it: {host:?}.\n\
         This protects against DNS rebinding (CVE-2018-5702). To be let in, add the name to --host-whitelist.\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Vec<String> {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    fn asked(headers: &[(&str, &str)]) -> Request<()> {
        let request = Request::get("/version");
        headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).body(()).unwrap()
    }

    #[test]
    fn hosts_are_compared_without_port() {
        let access = Access::new(&names(&["ok.test", "::1"]), &[]);
        for host in ["ok.test", "ok.test:2379", "[::1]:2379"] {
            assert!(access.check(&asked(&[("host", host)])).is_ok(), "{host}");
        }
        for host in ["bad.test", "bad.test:2379", "[::2]:2379", "OK.test"] {
            let refusal = access.check(&asked(&[("host", host)])).err().unwrap();
            assert_eq!(refusal.status(), StatusCode::MISDIRECTED_REQUEST, "{host}");
        }
        assert!(access.check(&asked(&[])).is_err());
        for all in [&[][..], &["*"], &["a", "*"]] {
            assert!(Access::new(&names(all), &[]).check(&asked(&[("host", "any")])).is_ok());
        }
    }

    #[test]
    fn origins_are_allowed_by_name_or_all() {
        let allowed = |access: &Access, origin: &str| {
            let mut headers = HeaderMap::new();
            access.check(&asked(&[("origin", origin)])).ok().unwrap().put_on(&mut headers);
            headers.get(ACCESS_CONTROL_ALLOW_ORIGIN).map(|origin| origin.to_str().unwrap().to_owned())
        };
        let listed = Access::new(&[], &names(&["http://a.test:80"]));
        assert_eq!(allowed(&listed, "http://a.test:80").as_deref(), Some("http://a.test:80"));
        assert_eq!(allowed(&listed, "http://b.test:80"), None);
        assert_eq!(allowed(&Access::new(&[], &names(&["*"])), "http://b.test").as_deref(), Some("*"));
    }
}
