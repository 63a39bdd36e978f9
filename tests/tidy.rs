//! Rules about the text of the repository that no compiler checks: arrows between modules, who may name which
//! library, dead files, names, sizes, layout.
//!
//! A rule is a function from all files to complaints, so that each is also shown a planted violation. Rust is read as
//! tokens: comments and strings do not count as code, and what a macro is given does.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, Ident, TokenStream, TokenTree};

/// What each module of the server may name besides itself and [`LEAVES`]. Arrows may skip, and never return.
const ARROWS: [(&str, &[&str]); 12] = [
    ("storage", &[]),
    ("cluster", &["storage"]),
    ("lease", &["storage"]),
    ("auth", &["storage"]),
    ("watch", &["storage"]),
    ("apply", &["auth", "lease", "cluster", "storage"]),
    ("raft", &["apply", "watch", "auth", "lease", "cluster", "storage"]),
    ("task", &["raft", "apply", "watch", "auth", "lease", "cluster", "storage"]),
    ("api", &["raft", "apply", "watch", "auth", "lease", "cluster", "storage"]),
    ("gateway", &["api", "raft", "apply", "watch", "auth", "lease", "cluster", "storage"]),
    ("tls", &[]),
    ("utl", &["raft", "cluster", "storage"]),
];
/// Usable by all, and by each other from right to left.
const LEAVES: [&str; 7] = ["proto", "clock", "sim", "blocking", "config", "telemetry", "process"];
/// Names everything; only `main` and the tests name it.
const ROOT: &str = "server";

/// Libraries with the folders of `src` that may name them.
const LIBRARIES: [(&[&str], &[&str]); 5] = [
    (&["openraft", "openraft_rt_tokio"], &["src/raft/"]),
    (&["rocksdb"], &["src/storage/"]),
    (&["domain"], &["src/server/"]),
    (&["aws_lc_rs"], &["src/auth/token/", "src/tls"]),
    (
        &["tonic", "http", "http_body", "http_body_util", "hyper", "hyper_util", "h2", "tower_service"],
        &["src/api/", "src/gateway/", "src/raft/network/", "src/server/"],
    ),
];

/// What is decided by the log alone, and what such code must not name.
const DETERMINISTIC: [&str; 5] =
    ["src/apply/", "src/cluster/", "src/lease/records.rs", "src/auth/", "src/storage/mvcc/write.rs"];
const DETERMINISTIC_EXCEPT: [&str; 2] = ["src/auth/token/", "src/auth/token.rs"];
const NOT_DETERMINISTIC: [&str; 9] =
    ["clock", "tokio", "Instant", "SystemTime", "rand", "fastrand", "deadlines", "token", "mpsc"];

/// Names that say nothing, for files, folders and modules.
const EMPTY_NAMES: [&str; 8] = ["util", "utils", "common", "helper", "helpers", "misc", "shared", "lib2"];
/// Endings of type names that say what a thing does for whom, not what it is.
const ROLES: [&str; 4] = ["Manager", "Handler", "Helper", "Util"];

/// Guards, far above the usual: a file past them holds more than one idea.
const FILE_LINES_MAX: usize = 750;
const FUNCTION_LINES_MAX: usize = 120;

const TOP_LEVEL: [&str; 23] = [
    ".cargo",
    ".ci",
    ".gitignore",
    ".gitattributes",
    "CHANGELOG.md",
    "Cargo.lock",
    "Cargo.toml",
    "LICENSE",
    "README.md",
    "benches",
    "clippy.toml",
    "control-plane",
    "deny.toml",
    "docs",
    "fuzz",
    "jepsen",
    "proto",
    "rustfmt.toml",
    "scripts",
    "sim",
    "src",
    "stand-ins",
    "tests",
];

/// Hosts that URLs in the repository may name: names made for examples, addresses of this machine, and where sources are.
const HOSTS: [&str; 4] = ["localhost", "example.com", "github.com", "etcd.io"];

/// A text file by its path from the root of the repository.
type Files = BTreeMap<String, String>;

#[test]
fn the_repository_is_tidy() {
    let files = read_all(Path::new(env!("CARGO_MANIFEST_DIR")));
    assert!(files.contains_key("src/lib.rs") && files.len() > 100, "the files are found");
    let rules = [arrows, libraries, determinism, dead_files, names, sizes, unfinished, hosts, layout];
    let complaints: Vec<String> = rules.iter().flat_map(|rule| rule(&files)).collect();
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

/// Modules name only what is to the right of them.
fn arrows(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in server_sources(files) {
        let Some(module) = module_of(path) else { continue };
        if module == ROOT {
            continue;
        }
        let allowed: Vec<&str> = match LEAVES.iter().position(|leaf| *leaf == module) {
            Some(position) => LEAVES[..position].to_vec(),
            None => {
                let Some((_, right)) = ARROWS.iter().find(|(name, _)| *name == module) else {
                    complaints
                        .push(format!("{path}: module {module} has no place in the picture of the arrows"));
                    continue;
                };
                [right, &LEAVES[..]].concat()
            }
        };
        for (named, line) in crate_paths(tokens(path, text), depth(path)) {
            let is_module =
                named == ROOT || LEAVES.contains(&&*named) || ARROWS.iter().any(|(name, _)| *name == named);
            if is_module && named != module && !allowed.contains(&&*named) {
                complaints.push(format!("{path}:{line}: {module} must not name {named}"));
            }
        }
    }
    complaints
}

/// Libraries stop where the architecture says.
fn libraries(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in server_sources(files) {
        for (ident, line) in path_starts(tokens(path, text)) {
            for (libraries, folders) in LIBRARIES {
                if libraries.contains(&&*ident) && !folders.iter().any(|folder| path.starts_with(folder)) {
                    complaints.push(format!("{path}:{line}: only {} may name {ident}", folders.join(", ")));
                }
            }
        }
    }
    complaints
}

/// Code that must do the same on every member names nothing that differs between members.
fn determinism(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in server_sources(files) {
        let excepted = DETERMINISTIC_EXCEPT.iter().any(|except| path.starts_with(except));
        if excepted || path.ends_with("/tests.rs") || !DETERMINISTIC.iter().any(|part| path.starts_with(part))
        {
            continue;
        }
        let mut idents = Vec::new();
        all_idents(without_tests(tokens(path, text)), &mut idents);
        for (at, ident) in idents.iter().enumerate() {
            // To declare the module is not to use it.
            let declared = at > 0 && idents[at - 1] == "mod";
            if !declared && NOT_DETERMINISTIC.iter().any(|name| *ident == name) {
                let line = ident.span().start().line;
                complaints.push(format!("{path}:{line}: {ident} may differ between members"));
            }
        }
    }
    complaints
}

/// Every Rust file is part of a crate.
fn dead_files(files: &Files) -> Vec<String> {
    let roots = files.keys().filter(|path| {
        let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let name = path.rsplit('/').next().unwrap_or_default();
        matches!(name, "main.rs" | "lib.rs" | "build.rs")
            || matches!(folder.rsplit('/').next(), Some("bin" | "benches" | "tests" | "targets" | "examples"))
                && is_root_folder(folder)
    });
    let mut alive: BTreeSet<String> = roots.filter(|path| path.ends_with(".rs")).cloned().collect();
    let mut to_read: Vec<String> = alive.iter().cloned().collect();
    while let Some(path) = to_read.pop() {
        for child in children(&path, tokens(&path, &files[&path])) {
            if files.contains_key(&child) && alive.insert(child.clone()) {
                to_read.push(child);
            }
        }
    }
    let all = files.keys().filter(|path| path.ends_with(".rs"));
    all.filter(|path| !alive.contains(*path)).map(|path| format!("{path}: no module declares it")).collect()
}

/// Files and types are named for what they are.
fn names(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in files {
        let parts = path.split('/').map(|part| part.split('.').next().unwrap_or_default());
        if let Some(part) = parts.into_iter().find(|part| EMPTY_NAMES.contains(part)) {
            complaints.push(format!("{path}: {part} says nothing; put it with its user"));
        }
        if !path.ends_with(".rs") {
            continue;
        }
        let mut idents = Vec::new();
        all_idents(tokens(path, text), &mut idents);
        for pair in idents.windows(2) {
            let name = pair[1].to_string();
            if ["struct", "enum", "trait"].iter().any(|word| pair[0] == word)
                && ROLES.iter().any(|role| name.ends_with(role))
            {
                complaints
                    .push(format!("{path}:{}: {name} is named for a role", pair[1].span().start().line));
            }
        }
    }
    complaints
}

/// Files and functions have a bound.
fn sizes(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in files.iter().filter(|(path, _)| path.ends_with(".rs")) {
        let lines = text.lines().count();
        if lines > FILE_LINES_MAX {
            complaints.push(format!("{path}: {lines} lines, at most {FILE_LINES_MAX}"));
        }
        for (name, line, lines) in functions(tokens(path, text)) {
            if lines > FUNCTION_LINES_MAX {
                complaints
                    .push(format!("{path}:{line}: {name} has {lines} lines, at most {FUNCTION_LINES_MAX}"));
            }
        }
    }
    complaints
}

/// Nothing is left for later in the text.
fn unfinished(files: &Files) -> Vec<String> {
    // Put together here, so that this file does not hold them.
    let words =
        [["TO", "DO"], ["FIX", "ME"], ["XX", "X:"], ["unimple", "mented!"], ["to", "do!("], ["#[ig", "nore"]];
    let words = words.map(|parts| parts.concat());
    let mut complaints = Vec::new();
    for (path, text) in files {
        for (number, line) in text.lines().enumerate() {
            if let Some(word) = words.iter().find(|word| holds_word(line, word)) {
                complaints.push(format!("{path}:{}: {word}", number + 1));
            }
        }
    }
    complaints
}

/// URLs name no host that a build could fetch from.
fn hosts(files: &Files) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, text) in files.iter().filter(|(path, _)| !path.ends_with("Cargo.lock")) {
        for (number, line) in text.lines().enumerate() {
            for rest in line.split("://").skip(1).zip(line.split("://")).filter_map(|(rest, scheme)| {
                (scheme.ends_with("http") || scheme.ends_with("https")).then_some(rest)
            }) {
                let host = rest
                    .split(['/', ':', '"', '\'', ' ', '`', ')', ',', '>', '?'])
                    .next()
                    .unwrap_or_default();
                let host = host.rsplit('@').next().unwrap_or_default().to_ascii_lowercase();
                let known = HOSTS.iter().any(|known| host == *known || host.ends_with(&format!(".{known}")));
                let is_address =
                    host.chars().all(|c| c.is_ascii_digit() || c == '.') || host.starts_with('[');
                // A name without a dot, or in a top-level domain kept for tests and examples, is nobody's.
                let is_nobodys = !host.contains('.')
                    || host.ends_with(".example")
                    || host.ends_with(".test")
                    || host.ends_with(".local");
                if !known && !is_address && !is_nobodys {
                    complaints.push(format!("{path}:{}: names the host {host}", number + 1));
                }
            }
        }
    }
    complaints
}

/// The top level is what the architecture draws.
fn layout(files: &Files) -> Vec<String> {
    let tops: BTreeSet<&str> = files.keys().filter_map(|path| path.split('/').next()).collect();
    tops.iter()
        .filter(|top| !TOP_LEVEL.contains(top))
        .map(|top| format!("{top}: not in the layout of the top level"))
        .collect()
}

// Reading Rust.

fn server_sources(files: &Files) -> impl Iterator<Item = (&str, &str)> {
    let sources = files.iter().filter(|(path, _)| path.starts_with("src/") && path.ends_with(".rs"));
    sources.map(|(path, text)| (path.as_str(), text.as_str()))
}

/// The top-level module a file of the server belongs to; none for `lib.rs` and the binaries.
fn module_of(path: &str) -> Option<&str> {
    let rest = path.strip_prefix("src/")?;
    let first = rest.split('/').next()?;
    let module = first.strip_suffix(".rs").unwrap_or(first);
    (!matches!(module, "lib" | "main" | "bin")).then_some(module)
}

fn tokens(path: &str, text: &str) -> TokenStream {
    text.parse().unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// How many modules a file is below the crate's root: `a.rs` and `a/mod.rs` are one below.
fn depth(path: &str) -> usize {
    path.trim_start_matches("src/").trim_end_matches("/mod.rs").split('/').count()
}

/// First names after `crate::`, `skeg::` and as many `super::` as lead to the root from `depth` modules below it;
/// groups and all.
fn crate_paths(stream: TokenStream, depth: usize) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let trees: Vec<TokenTree> = stream.into_iter().collect();
    for (at, tree) in trees.iter().enumerate() {
        let start = match tree {
            TokenTree::Group(group) => {
                found.extend(crate_paths(group.stream(), depth));
                continue;
            }
            TokenTree::Ident(ident) if ident == "crate" || ident == "skeg" => at,
            TokenTree::Ident(ident) if ident == "super" && depth > 0 => at + 3 * (depth - 1),
            _ => continue,
        };
        let only_supers = (at + 3..=start).step_by(3).all(|at| {
            after_colons(&trees, at - 3)
                .is_some_and(|tree| matches!(tree, TokenTree::Ident(word) if word == "super"))
        });
        if !only_supers {
            continue;
        }
        match after_colons(&trees, start) {
            Some(TokenTree::Ident(name)) => found.push((name.to_string(), name.span().start().line)),
            Some(TokenTree::Group(group)) => found.extend(group_heads(group.stream())),
            _ => {}
        }
    }
    found
}

/// The first name of each item of `{a, b::c}`.
fn group_heads(stream: TokenStream) -> Vec<(String, usize)> {
    let mut heads = Vec::new();
    let mut at_start = true;
    for tree in stream {
        match tree {
            TokenTree::Ident(ident) if at_start => {
                heads.push((ident.to_string(), ident.span().start().line));
                at_start = false;
            }
            TokenTree::Punct(punct) if punct.as_char() == ',' => at_start = true,
            _ => at_start = false,
        }
    }
    heads
}

/// Names that begin a path: followed by `::`, and not after one.
fn path_starts(stream: TokenStream) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let trees: Vec<TokenTree> = stream.into_iter().collect();
    for (at, tree) in trees.iter().enumerate() {
        match tree {
            TokenTree::Group(group) => found.extend(path_starts(group.stream())),
            TokenTree::Ident(ident) => {
                let continues = at > 0 && is_colon(&trees[at - 1]);
                let used = at > 0 && matches!(&trees[at - 1], TokenTree::Ident(word) if word == "use");
                if !continues && (used || after_colons(&trees, at).is_some()) {
                    found.push((ident.to_string(), ident.span().start().line));
                }
            }
            _ => {}
        }
    }
    found
}

fn after_colons(trees: &[TokenTree], at: usize) -> Option<&TokenTree> {
    let both = is_colon(trees.get(at + 1)?) && is_colon(trees.get(at + 2)?);
    if both { trees.get(at + 3) } else { None }
}

fn is_colon(tree: &TokenTree) -> bool {
    matches!(tree, TokenTree::Punct(punct) if punct.as_char() == ':')
}

fn all_idents(stream: TokenStream, into: &mut Vec<Ident>) {
    for tree in stream {
        match tree {
            TokenTree::Ident(ident) => into.push(ident),
            TokenTree::Group(group) => all_idents(group.stream(), into),
            _ => {}
        }
    }
}

/// The file without `mod tests { … }`.
fn without_tests(stream: TokenStream) -> TokenStream {
    let mut trees: Vec<TokenTree> = stream.into_iter().collect();
    let test_module = trees.windows(2).position(|pair| {
        matches!(pair, [TokenTree::Ident(word), TokenTree::Ident(name)] if word == "mod" && name == "tests")
    });
    if let Some(at) = test_module {
        trees.truncate(at);
    }
    trees.into_iter().collect()
}

/// Functions with a body: name, first line, number of lines.
fn functions(stream: TokenStream) -> Vec<(String, usize, usize)> {
    let mut found = Vec::new();
    let mut open: Option<Ident> = None;
    let mut after_fn = false;
    for tree in stream {
        match tree {
            TokenTree::Ident(ident) if ident == "fn" => after_fn = true,
            TokenTree::Ident(ident) if after_fn => {
                after_fn = false;
                open = Some(ident);
            }
            TokenTree::Punct(punct) if punct.as_char() == ';' => open = None,
            TokenTree::Group(group) => {
                found.extend(functions(group.stream()));
                if group.delimiter() == Delimiter::Brace
                    && let Some(name) = open.take()
                {
                    let first = name.span().start().line;
                    found.push((name.to_string(), first, group.span_close().start().line + 1 - first));
                }
                after_fn = false;
            }
            _ => after_fn = false,
        }
    }
    found
}

/// Where the modules that a file declares are expected: both places of each, and what `#[path]` says.
fn children(path: &str, stream: TokenStream) -> Vec<String> {
    let (folder, file) = path.rsplit_once('/').unwrap_or(("", path));
    let stem = file.strip_suffix(".rs").unwrap_or(file);
    let is_root = matches!(stem, "mod" | "main" | "lib") || is_root_folder(folder);
    let own = if is_root { folder.to_owned() } else { format!("{folder}/{stem}") };
    let mut found = Vec::new();
    let mut said = None;
    let trees: Vec<TokenTree> = stream.into_iter().collect();
    for (at, tree) in trees.iter().enumerate() {
        match tree {
            TokenTree::Group(group) if group.delimiter() == Delimiter::Bracket => {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                if let [TokenTree::Ident(word), _, TokenTree::Literal(literal)] = &inner[..]
                    && word == "path"
                {
                    said = Some(literal.to_string().trim_matches('"').to_owned());
                }
            }
            TokenTree::Ident(word) if word == "mod" => {
                let (Some(TokenTree::Ident(name)), Some(next)) = (trees.get(at + 1), trees.get(at + 2))
                else {
                    continue;
                };
                match (next, said.take()) {
                    (TokenTree::Punct(_), Some(said)) => found.push(join(folder, &said)),
                    (TokenTree::Punct(_), None) => {
                        found.push(format!("{own}/{name}.rs"));
                        found.push(format!("{own}/{name}/mod.rs"));
                    }
                    (TokenTree::Group(body), said) => {
                        // Inside an inline module, `#[path]` counts from a folder of that module's name.
                        let inside = said.unwrap_or_else(|| name.to_string());
                        found.extend(children(&format!("{own}/{inside}/mod.rs"), body.stream()));
                    }
                    _ => {}
                }
            }
            _ => {}
        }
    }
    found
}

/// True for the folders whose files each start a crate.
fn is_root_folder(folder: &str) -> bool {
    matches!(
        folder,
        "src/bin" | "benches" | "tests" | "fuzz/targets" | "sim/tests" | "proto/examples" | "proto/tests"
    )
}

fn join(folder: &str, relative: &str) -> String {
    let mut parts: Vec<&str> = folder.split('/').collect();
    for part in relative.split('/') {
        match part {
            ".." => drop(parts.pop()),
            "." => {}
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

fn holds_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
        !part(before) && (!part(after) || word.ends_with(['!', '(', ':']))
    })
}

// Reading the repository.

/// All text files, without what builds and runs leave behind.
fn read_all(root: &Path) -> Files {
    let mut files = Files::new();
    let mut folders: Vec<PathBuf> = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("a folder of the repository can be read") {
            let path = entry.expect("an entry can be read").path();
            let name = path.strip_prefix(root).expect("it is below the root").to_string_lossy().into_owned();
            if left_behind(&name) {
                continue;
            }
            if path.is_dir() {
                folders.push(path);
            } else if let Ok(text) = fs::read_to_string(&path) {
                files.insert(name, text);
            }
        }
    }
    files
}

/// What `.gitignore` names, and git's own.
fn left_behind(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    matches!(path, ".git" | "fuzz/corpus" | "fuzz/artifacts") || name == "target" || name.ends_with(".etcd")
}

// Each rule finds what is planted.

#[track_caller]
fn finds(rule: fn(&Files) -> Vec<String>, planted: &[(&str, &str)], expected: &[&str]) {
    let files: Files = planted.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect();
    assert_eq!(rule(&files), expected);
}

#[test]
fn arrows_that_return_are_found() {
    let text = "// crate::api::Comment\nuse crate::proto::mvccpb;\nuse crate::{raft::Node, clock, api};\nfn f() { \"crate::api\" }";
    finds(arrows, &[("src/raft/node.rs", text)], &["src/raft/node.rs:3: raft must not name api"]);
    finds(arrows, &[("src/api/kv.rs", text), ("src/server/mod.rs", text)], &[]);
    finds(
        arrows,
        &[(
            "src/watch/hub.rs",
            "fn f() { info!(x = crate::apply::X); super::super::raft::f(super::task::X) }",
        )],
        &["src/watch/hub.rs:1: watch must not name apply", "src/watch/hub.rs:1: watch must not name raft"],
    );
    finds(
        arrows,
        &[("src/config/mod.rs", "use crate::telemetry;")],
        &["src/config/mod.rs:1: config must not name telemetry"],
    );
    finds(
        arrows,
        &[("src/lease.rs", "use crate::server::run;")],
        &["src/lease.rs:1: lease must not name server"],
    );
    finds(
        arrows,
        &[("src/stuff/mod.rs", "")],
        &["src/stuff/mod.rs: module stuff has no place in the picture of the arrows"],
    );
}

#[test]
fn libraries_out_of_place_are_found() {
    let text =
        "//! rocksdb::DB\nuse rocksdb::DB;\nfn f(x: crate::rocksdb::Y) -> tonic::Status {}\nuse openraft;";
    finds(
        libraries,
        &[("src/apply/mod.rs", text)],
        &[
            "src/apply/mod.rs:2: only src/storage/ may name rocksdb",
            "src/apply/mod.rs:3: only src/api/, src/gateway/, src/raft/network/, src/server/ may name tonic",
            "src/apply/mod.rs:4: only src/raft/ may name openraft",
        ],
    );
    finds(
        libraries,
        &[("src/storage/engine.rs", "use rocksdb::{DB};"), ("src/gateway/http.rs", "use hyper::x;")],
        &[],
    );
}

#[test]
fn what_differs_between_members_is_found() {
    let text = "use std::time::Instant;\nmod tests { use crate::clock; }";
    finds(
        determinism,
        &[("src/apply/txn.rs", text)],
        &["src/apply/txn.rs:1: Instant may differ between members"],
    );
    finds(determinism, &[("src/raft/node.rs", text), ("src/auth/token/mod.rs", text)], &[]);
}

#[test]
fn dead_files_are_found() {
    let planted = [
        ("src/lib.rs", "mod a;"),
        ("src/a/mod.rs", "#[path = \"../odd.rs\"] mod b; mod tests { mod c; }"),
        ("src/odd.rs", ""),
        ("src/a/tests/c.rs", ""),
        ("src/a/dead.rs", ""),
        ("tests/one.rs", "mod two;"),
        ("tests/two/mod.rs", ""),
        ("tests/three/main.rs", "mod x;"),
        ("tests/three/x.rs", ""),
        ("tests/three/y.rs", ""),
    ];
    let expected = ["src/a/dead.rs: no module declares it", "tests/three/y.rs: no module declares it"];
    finds(dead_files, &planted, &expected);
}

#[test]
fn empty_names_and_roles_are_found() {
    let planted = [
        ("src/api/util.rs", ""),
        ("tests/common/x.go", ""),
        ("src/a.rs", "struct WatchManager; fn manager() {}"),
    ];
    let expected = [
        "src/a.rs:1: WatchManager is named for a role",
        "src/api/util.rs: util says nothing; put it with its user",
        "tests/common/x.go: common says nothing; put it with its user",
    ];
    finds(names, &planted, &expected);
}

#[test]
fn what_is_too_long_is_found() {
    let long = format!(
        "fn short() {{}}\nimpl X {{ fn long(x: [u8; 3]) {{\n{}}} }}",
        "f();\n".repeat(FUNCTION_LINES_MAX)
    );
    let longer = "\n".repeat(FILE_LINES_MAX + 1);
    let expected = [
        format!("src/a.rs:2: long has {} lines, at most {FUNCTION_LINES_MAX}", FUNCTION_LINES_MAX + 2),
        format!("src/b.rs: {} lines, at most {FILE_LINES_MAX}", FILE_LINES_MAX + 1),
    ];
    let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
    finds(sizes, &[("src/a.rs", &long), ("src/b.rs", &longer)], &expected);
}

#[test]
fn what_is_left_for_later_is_found() {
    let planted = ["// TO", "DO: later\nlet mastodon = 1; MASTO", "DON;\nto", "do!()"].concat();
    finds(
        unfinished,
        &[("src/a.rs", &planted)],
        &[&["src/a.rs:1: TO", "DO"].concat(), &["src/a.rs:3: to", "do!("].concat()],
    );
}

#[test]
fn hosts_are_found() {
    let text = "http://127.0.0.1:1 https://[::1]:2 http://a.example http://u@h/x ${http}://y\n see https:/";
    let text = format!("{text}/fetch.some.where/x");
    finds(hosts, &[("docs/a.md", &text)], &["docs/a.md:2: names the host fetch.some.where"]);
}

#[test]
fn new_top_level_entries_are_found() {
    finds(layout, &[("src/a.rs", ""), ("stuff/b.rs", "")], &["stuff: not in the layout of the top level"]);
}
