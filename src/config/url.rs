//! URLs as etcd's flags write them: a scheme, and `host:port` or the path of a unix socket; nothing else.
//!
//! ```text
//! http://127.0.0.1:2379     http://localhost:2380     http://[::1]:2379     unix:///run/skeg.sock     unix://localhost:m0
//! ```
//!
//! The text is kept as it was written (scheme in lower case), because member ids are derived from it and other members
//! compare it. A general URL library would normalise it: add a slash, drop port 80.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};

use super::syntax::ValueError;

/// How a URL is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scheme {
    /// TCP, in the clear.
    Http,
    /// TCP under TLS.
    Https,
    /// A unix socket, in the clear.
    Unix,
    /// A unix socket under TLS.
    Unixs,
}

/// One URL of a flag. Equality and order are those of its text.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Url {
    text: String,
    scheme: Scheme,
    authority: String,
    path: String,
}

/// A place to listen on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum ListenAddress {
    /// An IP address and port; port 0 lets the kernel choose.
    Tcp(SocketAddr),
    /// The path of a unix socket; a file that is already there is replaced.
    Unix(PathBuf),
}

/// A URL to listen on, with the address it stands for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ListenUrl {
    /// The URL as it was written.
    pub url: Url,
    /// Where to bind.
    pub address: ListenAddress,
}

impl Scheme {
    /// Says whether connections are encrypted.
    pub fn is_tls(self) -> bool {
        matches!(self, Self::Https | Self::Unixs)
    }

    /// Says whether the URL names a unix socket.
    pub fn is_unix(self) -> bool {
        matches!(self, Self::Unix | Self::Unixs)
    }
}

impl Url {
    /// Reads one URL, white space around it aside.
    ///
    /// # Errors
    /// For another scheme, a path behind `host:port`, or characters that no host has.
    pub fn parse(text: &str) -> Result<Self, ValueError> {
        let text = text.trim();
        if text.chars().any(char::is_control) {
            return Err(ValueError::new(format!("invalid control character in URL: {text:?}")));
        }
        let (scheme, rest) = split_scheme(text)?;
        let text = format!("{}{}", scheme_text(scheme), &text[text.len() - rest.len() - 1..]);
        let (authority, path) = match rest.strip_prefix("//") {
            Some(rest) => rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len())),
            None if rest.starts_with('/') => ("", rest),
            // `http:host:port` has no authority at all.
            None => ("", ""),
        };
        let path = &path[..path.find(['?', '#']).unwrap_or(path.len())];
        let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
        check_host(authority, &text)?;
        if !scheme.is_unix() {
            let port = split_host_port(authority).map(|(_, port)| port);
            if port.is_err() {
                return Err(ValueError::new(format!(
                    "URL address does not have the form \"host:port\": {text}"
                )));
            }
            if !port.is_ok_and(|port| port.bytes().all(|byte| byte.is_ascii_digit())) {
                return Err(ValueError::new(format!("invalid port in URL: {text}")));
            }
            if !path.is_empty() {
                return Err(ValueError::new(format!("URL must not contain a path: {text}")));
            }
        }
        Ok(Self { scheme, authority: authority.to_owned(), path: path.to_owned(), text })
    }

    /// Reads a comma-separated list, sorts it and drops repetitions.
    ///
    /// # Errors
    /// As [`Url::parse`], for the first URL that fails.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, ValueError> {
        let mut urls = text.split(',').map(Self::parse).collect::<Result<Vec<_>, _>>()?;
        urls.sort();
        urls.dedup();
        Ok(urls)
    }

    /// Returns the URL as it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns how it is reached.
    pub fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// Returns the host without port and brackets; empty for a unix socket.
    pub fn host(&self) -> &str {
        split_host_port(&self.authority).map_or("", |(host, _)| host)
    }

    /// Returns the port as it was written; empty for a unix socket.
    pub fn port(&self) -> &str {
        split_host_port(&self.authority).map_or("", |(_, port)| port)
    }

    /// Returns the path of the unix socket; empty for other schemes.
    ///
    /// etcd takes everything behind the scheme for the path, so `unix://localhost:m0` is a file of that odd name in the
    /// working directory.
    pub fn socket_path(&self) -> PathBuf {
        if self.scheme.is_unix() {
            Path::new(&format!("{}{}", self.authority, self.path)).to_path_buf()
        } else {
            PathBuf::new()
        }
    }

    /// Says whether both name the same place, letters of the host in either case.
    pub fn same_place(&self, other: &Self) -> bool {
        self.scheme == other.scheme
            && self.path == other.path
            && self.authority.eq_ignore_ascii_case(&other.authority)
    }

    /// Returns a copy that names another host, port kept.
    pub(super) fn with_host(&self, host: IpAddr, port: &str) -> Self {
        let authority = match host {
            IpAddr::V4(ip) => format!("{ip}:{port}"),
            IpAddr::V6(ip) => format!("[{ip}]:{port}"),
        };
        let text = format!("{}://{authority}", scheme_text(self.scheme));
        Self { text, scheme: self.scheme, authority, path: String::new() }
    }

    /// Resolves a URL to listen on.
    ///
    /// # Errors
    /// For a host that is neither an IP address nor `localhost`, and for a port above 65535.
    pub fn listen(&self) -> Result<ListenUrl, ValueError> {
        let address = if self.scheme.is_unix() {
            let path = self.socket_path();
            if path.as_os_str().is_empty() {
                return Err(ValueError::new(format!("expected a path in URL for binding ({self})")));
            }
            ListenAddress::Unix(path)
        } else {
            let ip = match self.host() {
                "localhost" => IpAddr::V4(Ipv4Addr::LOCALHOST),
                host => host
                    .parse()
                    .map_err(|_| ValueError::new(format!("expected IP in URL for binding ({self})")))?,
            };
            let port = match self.port() {
                "" => 0,
                port => port
                    .parse()
                    .map_err(|_| ValueError::new(format!("invalid port in URL for binding ({self})")))?,
            };
            ListenAddress::Tcp(SocketAddr::new(ip, port))
        };
        Ok(ListenUrl { url: self.clone(), address })
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn scheme_text(scheme: Scheme) -> &'static str {
    match scheme {
        Scheme::Http => "http",
        Scheme::Https => "https",
        Scheme::Unix => "unix",
        Scheme::Unixs => "unixs",
    }
}

fn split_scheme(text: &str) -> Result<(Scheme, &str), ValueError> {
    let unknown = || ValueError::new(format!("URL scheme must be http, https, unix, or unixs: {text}"));
    let (scheme, rest) = text.split_once(':').ok_or_else(unknown)?;
    let scheme = match scheme.to_ascii_lowercase().as_str() {
        "http" => Scheme::Http,
        "https" => Scheme::Https,
        "unix" => Scheme::Unix,
        "unixs" => Scheme::Unixs,
        _ => return Err(unknown()),
    };
    Ok((scheme, rest))
}

fn check_host(authority: &str, text: &str) -> Result<(), ValueError> {
    let bad = |c: char| matches!(c, ' ' | '\\' | '^' | '`' | '{' | '|' | '}' | '%');
    match authority.chars().find(|c| bad(*c)) {
        Some(c) => Err(ValueError::new(format!("invalid character {c:?} in host name: {text}"))),
        None => Ok(()),
    }
}

/// Splits `host:port` or `[host]:port`.
fn split_host_port(authority: &str) -> Result<(&str, &str), ValueError> {
    let bad = || ValueError::new(format!("address {authority}: not of the form host:port"));
    if let Some(rest) = authority.strip_prefix('[') {
        let (host, after) = rest.split_once(']').ok_or_else(bad)?;
        let port = after.strip_prefix(':').ok_or_else(bad)?;
        return Ok((host, port));
    }
    let (host, port) = authority.rsplit_once(':').ok_or_else(bad)?;
    if host.contains([':', '[', ']']) { Err(bad()) } else { Ok((host, port)) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::{ListenAddress, Scheme, Url};

    fn url(text: &str) -> Url {
        Url::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    fn tcp(text: &str) -> String {
        match url(text).listen().map(|listen| listen.address) {
            Ok(ListenAddress::Tcp(address)) => address.to_string(),
            other => panic!("{text}: {other:?}"),
        }
    }

    #[test]
    fn the_text_survives() {
        for text in [
            "http://localhost:2380",
            "http://[::1]:2379",
            "http://h:80",
            "unix:///run/s.sock",
            "unix:/run/s.sock",
            "http://u@h:1",
        ] {
            assert_eq!(url(text).to_string(), text);
        }
        assert_eq!(url(" HTTP://H:1 ").as_str(), "http://H:1");
    }

    #[test]
    fn parts_are_found() {
        let v6 = url("https://[fe80::1]:2379");
        assert_eq!((v6.scheme(), v6.host(), v6.port()), (Scheme::Https, "fe80::1", "2379"));
        let named = url("http://node.example:2380");
        assert_eq!((named.host(), named.port()), ("node.example", "2380"));
    }

    #[test]
    fn what_is_not_a_url_is_refused() {
        for text in [
            "",
            "127.0.0.1:2379",
            "ftp://h:1",
            "http://h",
            "http://::1:2379",
            "http://h:1/",
            "http://h:1/path",
            "http://h:-1",
            "http://h:x",
            "http://a b:1",
            "http://[::1:1",
            "http://[::1]",
            "http:h:1",
            "http://",
            "http://h:1\u{1}",
            "http://h%41:1",
            "://h:1",
        ] {
            assert!(Url::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn lists_are_sorted_and_unique() {
        let list = Url::parse_list("http://b:1, http://a:1,http://b:1").unwrap();
        assert_eq!(list.iter().map(Url::as_str).collect::<Vec<_>>(), ["http://a:1", "http://b:1"]);
        assert!(Url::parse_list("http://a:1,").is_err());
    }

    #[test]
    fn listening_wants_an_address() {
        assert_eq!(tcp("http://localhost:2379"), "127.0.0.1:2379");
        assert_eq!(tcp("http://0.0.0.0:0"), "0.0.0.0:0");
        assert_eq!(tcp("http://[::]:2379"), "[::]:2379");
        assert_eq!(tcp("http://127.0.0.1:"), "127.0.0.1:0");
        for text in [
            "http://example.com:1",
            "http://:2379",
            "http://h:99999",
            "http://127.0.0.1:99999",
            "unix://",
            "unix:rel",
        ] {
            assert!(url(text).listen().is_err(), "{text}");
        }
    }

    #[test]
    fn unix_sockets_are_paths() {
        for (text, path) in [
            ("unix:///abs/path", "/abs/path"),
            ("unix:/abs", "/abs"),
            ("unix://rel/x", "rel/x"),
            ("unix://localhost:m0", "localhost:m0"),
        ] {
            assert_eq!(url(text).socket_path(), Path::new(path), "{text}");
            assert!(
                matches!(url(text).listen().unwrap().address, ListenAddress::Unix(p) if p == Path::new(path))
            );
        }
        assert_eq!(url("http://h:1").socket_path(), Path::new(""));
    }

    #[test]
    fn hosts_compare_in_either_case() {
        assert!(url("http://Node:1").same_place(&url("http://node:1")));
        assert!(!url("http://node:1").same_place(&url("http://node:2")));
        assert!(!url("http://node:1").same_place(&url("https://node:1")));
    }
}
