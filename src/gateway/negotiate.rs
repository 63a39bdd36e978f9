//! What a reader of metrics can take, by its headers, as Go's Prometheus library reads them.
//!
//! There is one format, the text; OpenMetrics is not offered by etcd either. What is left to agree on is compression,
//! and which escaping of names the answer says to have: the names here are the same in all that are known.

use http::header::{ACCEPT, ACCEPT_ENCODING, HeaderMap, HeaderName};

/// The content type of the text format, by the escaping that a reader asks for.
const CONTENT_TYPES: [(&str, &str); 3] = [
    ("underscores", "text/plain; version=0.0.4; charset=utf-8; escaping=underscores"),
    ("allow-utf-8", "text/plain; version=0.0.4; charset=utf-8; escaping=allow-utf-8"),
    ("values", "text/plain; version=0.0.4; charset=utf-8; escaping=values"),
];

/// The content type to answer with.
pub(super) fn content_type(headers: &HeaderMap) -> &'static str {
    let mut clauses = clauses(headers, &ACCEPT);
    clauses.sort_by(|a, b| b.quality.total_cmp(&a.quality));
    let mut chosen = CONTENT_TYPES[0].1;
    for clause in clauses {
        let asked = clause.parameter("escaping");
        let known = CONTENT_TYPES.iter().find(|(name, _)| asked == Some(*name));
        chosen = known.map_or(chosen, |(_, content_type)| *content_type);
        if clause.name == "text/plain" && matches!(clause.parameter("version"), None | Some("0.0.4")) {
            break;
        }
    }
    chosen
}

/// True if gzip is wanted more than the plain text.
pub(super) fn wants_gzip(headers: &HeaderMap) -> bool {
    let clauses = clauses(headers, &ACCEPT_ENCODING);
    let wish = |encoding: &str| {
        let matching = clauses.iter().filter(|clause| clause.name == encoding || clause.name == "*");
        matching.map(|clause| clause.quality).fold(0.0, f64::max)
    };
    wish("gzip") > wish("identity")
}

/// A name with parameters, one of a list.
struct Clause<'h> {
    name: &'h str,
    parameters: Vec<(&'h str, &'h str)>,
    quality: f64,
}

impl Clause<'_> {
    fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(found, _)| *found == name).map(|(_, value)| *value)
    }
}

/// The clauses of a header; those whose quality cannot be read are left out.
fn clauses<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Vec<Clause<'h>> {
    let lines = headers.get_all(name).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).filter_map(clause).collect()
}

fn clause(text: &str) -> Option<Clause<'_>> {
    let mut parts = text.split(';').map(str::trim);
    let name = parts.next()?;
    let parameters: Vec<_> = parts.filter_map(|part| part.split_once('=')).collect();
    let mut quality = 1.0;
    if let Some((_, text)) = parameters.iter().find(|(name, _)| *name == "q") {
        quality = text.parse().ok().filter(|quality| (0.0..=1.0).contains(quality))?;
    }
    Some(Clause { name, parameters, quality })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: HeaderName, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(name, value.parse().unwrap())])
    }

    #[test]
    fn gzip_is_used_when_it_is_liked_best() {
        for (asked, wanted) in [
            ("gzip", true),
            ("deflate, gzip;q=0.5", true),
            ("identity;q=0.5, gzip", true),
            ("gzip;q=0.001", true),
            ("gzip ; q=1", true),
            ("gzip, identity", false),
            ("gzip;q=0", false),
            ("gzip;q=abc", false),
            ("identity, gzip;q=0.9", false),
            ("*", false),
            ("br, *;q=0.1", false),
            ("zstd", false),
            ("", false),
        ] {
            assert_eq!(wants_gzip(&headers(ACCEPT_ENCODING, asked)), wanted, "{asked}");
        }
        assert!(!wants_gzip(&HeaderMap::new()));
    }

    #[test]
    fn the_escaping_that_is_asked_for_is_named() {
        let prometheus = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1";
        for (asked, wanted) in [
            ("", "underscores"),
            ("*/*", "underscores"),
            ("application/openmetrics-text; version=1.0.0", "underscores"),
            (prometheus, "allow-utf-8"),
            ("text/plain;version=0.0.4,text/plain;version=1.0.0;escaping=values;q=0.5", "underscores"),
            ("application/x;escaping=allow-utf-8,text/html;escaping=values;q=0.5", "values"),
            ("text/plain;escaping=nothing", "underscores"),
        ] {
            let found = content_type(&headers(ACCEPT, asked));
            assert_eq!(found.rsplit_once('=').unwrap().1, wanted, "{asked}");
        }
    }
}
