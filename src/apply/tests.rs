//! Scenarios as text: `testscripts/` holds commands and, below `---`, what they answer and change.
//!
//! Every script is run command by command; then its whole log again, as one run, from the start and from every state
//! that a flush left on disk, which must come out the same. With `REWRITE_TESTSCRIPTS` set, the expected text is
//! rewritten; the difference is then for a person to read.
//!
//! ```text
//! put KEY VALUE [lease=N] [prev] [ignore_value] [ignore_lease]
//! del RANGE [prev]                             a range is `a`, `a..c` or `a..`
//! txn (COMPARE)... then (OP)... else (OP)...   an operation is put, del, get or txn
//! compact N                                    a compare is (TARGET RANGE OPERATOR [VALUE])
//! lease grant ID TTL | revoke ID | expire ID TERM | checkpoint ID REMAINING
//! alarm get|activate|deactivate MEMBER TYPE
//! level N [MEMBER ...]
//! state | flush | run COUNT                    the next commands in one run
//! ```

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use super::*;
use crate::cluster::level::LEVEL;
use crate::proto::etcdserverpb::compare::TargetUnion;
use crate::proto::etcdserverpb::request_op::Request;
use crate::proto::etcdserverpb::response_op::Response;
use crate::proto::mvccpb;
use crate::proto::skegpb::{ClusterLevelSet, LeaseExpire};
use crate::storage::EngineOptions;
use crate::storage::mvcc::read::Change;
use crate::storage::mvcc::{KeyRange, RangeEnd, StoreOptions};
use crate::storage::schema::Trail;

/// The term of every entry; `lease expire` may name another.
const TERM: u64 = 7;

fn open(dir: &Path) -> State {
    let engine = EngineOptions { memtable_bytes: 4 << 20, block_cache_bytes: 4 << 20 };
    let store = Store::open(dir, StoreOptions { engine, heads_bytes: 1 << 14 }).expect("the store opens");
    State::open(Arc::new(store)).expect("the leases and members load")
}

/// A word or a list in parentheses.
#[derive(Clone, Debug)]
enum Word {
    Plain(String),
    List(Vec<Word>),
}

impl Word {
    fn text(&self) -> &str {
        match self {
            Word::Plain(text) => text,
            Word::List(list) => panic!("a word is expected, not {list:?}"),
        }
    }
}

fn words(line: &str) -> Vec<Word> {
    let spaced = line.replace('(', " ( ").replace(')', " ) ");
    let mut open = vec![Vec::new()];
    for piece in spaced.split_whitespace() {
        match piece {
            "(" => open.push(Vec::new()),
            ")" => {
                let list = open.pop().expect("a list is open");
                open.last_mut().expect("parentheses match").push(Word::List(list));
            }
            plain => open.last_mut().expect("parentheses match").push(Word::Plain(plain.to_owned())),
        }
    }
    assert_eq!(open.len(), 1, "parentheses match: {line}");
    open.pop().expect("one list is left")
}

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn range(text: &str) -> (Bytes, Bytes) {
    match text.split_once("..") {
        None => (bytes(text), Bytes::new()),
        Some(("", "")) => (bytes("\0"), bytes("\0")),
        Some((start, "")) => (bytes(start), bytes("\0")),
        Some((start, end)) => (bytes(start), bytes(end)),
    }
}

fn number<T: std::str::FromStr>(text: &str) -> T {
    text.parse().unwrap_or_else(|_| panic!("a number is expected, not {text}"))
}

/// The value of `name=value` among the words.
fn setting<T: std::str::FromStr + Default>(words: &[Word], name: &str) -> T {
    let found = words.iter().filter_map(|word| match word {
        Word::Plain(text) => text.strip_prefix(name)?.strip_prefix('='),
        Word::List(_) => None,
    });
    found.map(number).next().unwrap_or_default()
}

fn has(words: &[Word], name: &str) -> bool {
    words.iter().any(|word| matches!(word, Word::Plain(text) if text == name))
}

fn put(words: &[Word]) -> pb::PutRequest {
    let value = words.get(1).map(Word::text).filter(|text| !text.contains("ignore") && *text != "-");
    pb::PutRequest {
        key: bytes(words[0].text()),
        value: value.map(bytes).unwrap_or_default(),
        lease: setting(words, "lease"),
        prev_kv: has(words, "prev"),
        ignore_value: has(words, "ignore_value"),
        ignore_lease: has(words, "ignore_lease"),
    }
}

fn delete(words: &[Word]) -> pb::DeleteRangeRequest {
    let (key, range_end) = range(words[0].text());
    pb::DeleteRangeRequest { key, range_end, prev_kv: has(words, "prev") }
}

fn get(words: &[Word]) -> pb::RangeRequest {
    let (key, range_end) = range(words[0].text());
    let (revision, limit) = (setting(words, "rev"), setting(words, "limit"));
    pb::RangeRequest {
        key,
        range_end,
        revision,
        limit,
        count_only: has(words, "count"),
        ..Default::default()
    }
}

fn compare(words: &[Word]) -> pb::Compare {
    let (key, range_end) = range(words[1].text());
    let value = words.get(3).map(Word::text);
    let (target, wanted): (i32, fn(&str) -> TargetUnion) = match words[0].text() {
        "version" => (0, |text| TargetUnion::Version(number(text))),
        "create" => (1, |text| TargetUnion::CreateRevision(number(text))),
        "mod" => (2, |text| TargetUnion::ModRevision(number(text))),
        "value" => (3, |text| TargetUnion::Value(bytes(text))),
        "lease" => (4, |text| TargetUnion::Lease(number(text))),
        other => (number(other), |text| TargetUnion::Version(number(text))),
    };
    let result = match words[2].text() {
        "=" => 0,
        ">" => 1,
        "<" => 2,
        "!=" => 3,
        other => number(other),
    };
    pb::Compare { result, target, key, range_end, target_union: value.map(wanted) }
}

fn txn(words: &[Word]) -> pb::TxnRequest {
    let mut request = pb::TxnRequest::default();
    let mut ops: Option<&mut Vec<pb::RequestOp>> = None;
    for word in words {
        match word {
            Word::Plain(text) if text == "then" => ops = Some(&mut request.success),
            Word::Plain(text) if text == "else" => ops = Some(&mut request.failure),
            Word::Plain(text) => panic!("then or else is expected, not {text}"),
            Word::List(list) => match &mut ops {
                None => request.compare.push(compare(list)),
                Some(ops) => ops.push(op(list)),
            },
        }
    }
    request
}

fn op(words: &[Word]) -> pb::RequestOp {
    let rest = &words[1..];
    let request = match words[0].text() {
        "put" => Request::RequestPut(put(rest)),
        "del" => Request::RequestDeleteRange(delete(rest)),
        "get" => Request::RequestRange(get(rest)),
        "txn" => Request::RequestTxn(txn(rest)),
        other => panic!("unknown operation {other}"),
    };
    pb::RequestOp { request: Some(request) }
}

fn command(words: &[Word]) -> Kind {
    let rest = &words[1..];
    match words[0].text() {
        "put" => Kind::Put(put(rest)),
        "del" => Kind::DeleteRange(delete(rest)),
        "txn" => Kind::Txn(txn(rest)),
        "compact" => {
            Kind::Compaction(pb::CompactionRequest { revision: number(rest[0].text()), physical: false })
        }
        "lease" => {
            let id = number(rest[1].text());
            match rest[0].text() {
                "grant" => Kind::LeaseGrant(pb::LeaseGrantRequest { ttl: number(rest[2].text()), id }),
                "revoke" => Kind::LeaseRevoke(pb::LeaseRevokeRequest { id }),
                "expire" => Kind::LeaseExpire(LeaseExpire { id, term: number(rest[2].text()) }),
                "checkpoint" => {
                    let checkpoint = pb::LeaseCheckpoint { id, remaining_ttl: number(rest[2].text()) };
                    Kind::LeaseCheckpoint(pb::LeaseCheckpointRequest { checkpoints: vec![checkpoint] })
                }
                other => panic!("unknown lease command {other}"),
            }
        }
        "alarm" => Kind::Alarm(pb::AlarmRequest {
            action: match rest[0].text() {
                "get" => 0,
                "activate" => 1,
                "deactivate" => 2,
                other => number(other),
            },
            member_id: number(rest[1].text()),
            alarm: match rest[2].text() {
                "none" => 0,
                "nospace" => 1,
                "corrupt" => 2,
                other => number(other),
            },
        }),
        "level" => Kind::ClusterLevelSet(ClusterLevelSet {
            level: number(rest[0].text()),
            member_ids: rest[1..].iter().map(|id| number(id.text())).collect(),
        }),
        other => panic!("unknown command {other}"),
    }
}

fn show(kv: &mvccpb::KeyValue) -> String {
    let text = |bytes: &Bytes| bytes.escape_ascii().to_string();
    let lease = if kv.lease == 0 { String::new() } else { format!(" lease {}", kv.lease) };
    let (create, modified) = (kv.create_revision, kv.mod_revision);
    format!(
        "{}={} create {create} mod {modified} version {}{lease}",
        text(&kv.key),
        text(&kv.value),
        kv.version
    )
}

fn at(header: Option<&pb::ResponseHeader>) -> i64 {
    header.map_or(-1, |header| header.revision)
}

fn show_put(out: &mut String, indent: &str, response: &pb::PutResponse) {
    let _ = writeln!(out, "{indent}put at {}", at(response.header.as_ref()));
    if let Some(previous) = &response.prev_kv {
        let _ = writeln!(out, "{indent}  was {}", show(previous));
    }
}

fn show_delete(out: &mut String, indent: &str, response: &pb::DeleteRangeResponse) {
    let _ = writeln!(out, "{indent}deleted {} at {}", response.deleted, at(response.header.as_ref()));
    for previous in &response.prev_kvs {
        let _ = writeln!(out, "{indent}  was {}", show(previous));
    }
}

fn show_txn(out: &mut String, indent: &str, response: &pb::TxnResponse) {
    let branch = if response.succeeded { "then" } else { "else" };
    let _ = writeln!(out, "{indent}{branch} at {}", at(response.header.as_ref()));
    let inner = format!("{indent}  ");
    for response in &response.responses {
        match response.response.as_ref().expect("a response says what it is") {
            Response::ResponsePut(response) => show_put(out, &inner, response),
            Response::ResponseDeleteRange(response) => show_delete(out, &inner, response),
            Response::ResponseTxn(response) => show_txn(out, &inner, response),
            Response::ResponseRange(response) => {
                let more = if response.more { ", more" } else { "" };
                let _ = writeln!(out, "{inner}{} at {}{more}", response.count, at(response.header.as_ref()));
                for kv in &response.kvs {
                    let _ = writeln!(out, "{inner}  {}", show(kv));
                }
            }
        }
    }
}

fn show_outcome(out: &mut String, outcome: &Outcome) {
    match outcome {
        Err(refusal) => {
            let _ = writeln!(out, "refused: {refusal}");
        }
        Ok(Reply::None) => out.push_str("done\n"),
        Ok(Reply::Auth { revision, index }) => {
            let _ = writeln!(out, "users and roles changed by entry {index} at {revision}");
        }
        Ok(Reply::Members(members)) => {
            let names: Vec<String> = members.iter().map(|member| format!("{:x}", member.id)).collect();
            let _ = writeln!(out, "members {}", names.join(", "));
        }
        Ok(Reply::Put(response)) => show_put(out, "", response),
        Ok(Reply::DeleteRange(response)) => show_delete(out, "", response),
        Ok(Reply::Txn(response)) => show_txn(out, "", response),
        Ok(Reply::Compaction(response)) => {
            let _ = writeln!(out, "compacted at {}", at(response.header.as_ref()));
        }
        Ok(Reply::LeaseGrant(response)) => {
            let _ = writeln!(
                out,
                "granted {} for {} s at {}",
                response.id,
                response.ttl,
                at(response.header.as_ref())
            );
        }
        Ok(Reply::LeaseRevoke(response)) => {
            let _ = writeln!(out, "revoked at {}", at(response.header.as_ref()));
        }
        Ok(Reply::Alarm(response)) => {
            let alarms: Vec<String> = response
                .alarms
                .iter()
                .map(|alarm| format!("{} {}", alarm.member_id, alarm.alarm().as_str_name()))
                .collect();
            let _ = writeln!(out, "alarms: [{}]", alarms.join(", "));
        }
    }
}

fn show_effects(out: &mut String, effects: &Effects) {
    for event in &effects.events {
        let revision = format!("{}.{}", event.revision.main, event.revision.sub);
        let key = event.key.escape_ascii();
        let _ = match &event.change {
            Change::Put { value, .. } => writeln!(out, "  {revision} put {key}={}", value.escape_ascii()),
            Change::Delete => writeln!(out, "  {revision} del {key}"),
        };
    }
    for change in &effects.leases {
        let _ = writeln!(out, "  {change:?}");
    }
    for compaction in &effects.compactions {
        let _ = writeln!(out, "  {compaction:?}");
    }
}

/// Everything that the log has made, from memory and from what is stored.
fn show_state(state: &State) -> String {
    let store = state.store();
    let mut out = format!("revision {} compacted {}\n", store.revision(), store.compacted());
    let all = KeyRange { start: Bytes::new(), end: RangeEnd::Unbounded };
    let mut scan = store.scan(&all, store.revision());
    while let Some(record) = scan.next().expect("the scan reads") {
        let kv = mvccpb::KeyValue {
            key: Bytes::copy_from_slice(record.key),
            create_revision: record.meta.create_revision,
            mod_revision: record.meta.modified.main,
            version: record.meta.version,
            value: Bytes::copy_from_slice(record.value),
            lease: record.meta.lease,
        };
        let _ = writeln!(out, "{}", show(&kv));
    }
    let stored = lease::load(store.engine()).expect("the leases load");
    let leases = state.leases.read();
    assert_eq!(stored.iter().collect::<Vec<_>>(), leases.iter().collect::<Vec<_>>());
    for lease in leases.iter() {
        let keys = lease::attached_keys(store.engine(), lease.id).expect("the keys read");
        let keys: Vec<String> = keys.iter().map(|key| key.escape_ascii().to_string()).collect();
        let (ttl, remaining) = (lease.ttl_seconds, lease.remaining_seconds);
        let _ = writeln!(out, "lease {} ttl {ttl} remaining {remaining} keys [{}]", lease.id, keys.join(" "));
    }
    let stored = cluster::load(store.engine()).expect("the members load");
    assert_eq!(stored.alarms_of_type(0), state.cluster.read().alarms_of_type(0));
    if stored.level() > 0 {
        let _ = writeln!(out, "level {}", stored.level());
    }
    for alarm in stored.alarms_of_type(0) {
        let _ = writeln!(out, "alarm {} {}", alarm.member_id, alarm.alarm().as_str_name());
    }
    out
}

fn copy(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().expect("a directory");
    for entry in std::fs::read_dir(from).expect("the directory lists") {
        let name = entry.expect("the directory lists").file_name();
        std::fs::copy(from.join(&name), to.path().join(&name)).expect("the file copies");
    }
    to
}

/// A script in the making.
struct Script {
    dir: tempfile::TempDir,
    state: State,
    log: Vec<Kind>,
    outcomes: Vec<Outcome>,
    /// Copies of what a flush left, with the length of the log then.
    flushed: Vec<(tempfile::TempDir, usize)>,
}

impl Script {
    /// Applies commands in one run and says what came of it.
    fn apply(&mut self, commands: Vec<Kind>) -> String {
        let store = self.state.store();
        let before = store.hash_all().expect("it hashes");
        let mut run = Run::new(&self.state, &store);
        let mut outcomes = Vec::new();
        for command in commands {
            self.log.push(command.clone());
            let position = LogId { term: TERM, node_id: 0, index: self.log.len() as u64 };
            outcomes.push(run.apply(command, None, position).expect("the command applies"));
        }
        let effects = run.commit().expect("the run commits");
        let mut out = String::new();
        outcomes.iter().for_each(|outcome| show_outcome(&mut out, outcome));
        show_effects(&mut out, &effects);
        if outcomes.iter().all(Result::is_err) {
            assert_eq!(store.hash_all().expect("it hashes"), before, "a refusal changes nothing");
            assert!(effects.events.is_empty() && effects.leases.is_empty());
        }
        self.outcomes.extend(outcomes);
        out
    }

    /// Applies the log again, in one run, to a state that holds the first `done` commands.
    fn replay(&self, dir: &Path, done: usize) {
        let state = open(dir);
        let store = state.store();
        let mut run = Run::new(&state, &store);
        for (at, command) in self.log.iter().enumerate().skip(done) {
            let position = LogId { term: TERM, node_id: 0, index: at as u64 + 1 };
            let outcome = run.apply(command.clone(), None, position).expect("the command applies");
            assert_eq!(outcome, self.outcomes[at], "command {at} replayed from {done}: {command:?}");
        }
        run.commit().expect("the run commits");
        assert_eq!(show_state(&state), show_state(&self.state), "replayed from {done}");
        let hash = |state: &State| state.store().hash_kv(0).expect("it hashes");
        assert_eq!(hash(&state), hash(&self.state));
        let trail = |state: &State| state.trails.read().last();
        assert_eq!(trail(&state), trail(&self.state), "replayed from {done}");
        let stored = State::open(state.store()).expect("it opens").trails.read().last();
        assert_eq!(stored, trail(&state), "as stored");
    }
}

fn run_script(text: &str) -> String {
    let dir = tempfile::tempdir().expect("a directory");
    let state = open(dir.path());
    let mut script = Script { dir, state, log: Vec::new(), outcomes: Vec::new(), flushed: Vec::new() };
    let mut out = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.is_empty() || line.starts_with('#') {
            let _ = writeln!(out, "{line}");
            continue;
        }
        if let Some(command) = line.strip_prefix("> ") {
            let _ = writeln!(out, "> {command}");
            match command {
                "state" => out.push_str(&show_state(&script.state)),
                "flush" => {
                    script.state.store().engine().flush().expect("the store flushes");
                    script.flushed.push((copy(script.dir.path()), script.log.len()));
                }
                _ => match command.strip_prefix("run ") {
                    None => out.push_str(&script.apply(vec![self::command(&words(command))])),
                    Some(count) => {
                        let mut commands = Vec::new();
                        while commands.len() < number::<usize>(count) {
                            let line = lines.next().expect("the run's commands follow");
                            let Some(line) = line.strip_prefix("+ ") else { continue };
                            let _ = writeln!(out, "+ {line}");
                            commands.push(self::command(&words(line)));
                        }
                        out.push_str(&script.apply(commands));
                    }
                },
            }
        }
    }
    script.replay(tempfile::tempdir().expect("a directory").path(), 0);
    for (dir, done) in &script.flushed {
        script.replay(dir.path(), *done);
    }
    out
}

#[test]
fn scripts_answer_as_written() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/apply/testscripts");
    let rewrite = std::env::var_os("REWRITE_TESTSCRIPTS").is_some();
    let mut count = 0;
    for entry in std::fs::read_dir(folder).expect("the scripts list") {
        let path = entry.expect("the scripts list").path();
        let expected = std::fs::read_to_string(&path).expect("the script reads");
        println!("{}", path.display());
        let found = run_script(&expected);
        if rewrite {
            std::fs::write(&path, found).expect("the script is rewritten");
        } else {
            assert_eq!(found, expected, "{}", path.display());
        }
        count += 1;
    }
    assert!(count >= 8, "the scripts are found");
}

/// Applies commands, one run each, behind what is there.
fn apply_all(state: &State, from: u64, commands: Vec<Kind>) {
    let store = state.store();
    for (index, command) in (from..).zip(commands) {
        let mut run = Run::new(state, &store);
        let applied = run.apply(command, None, LogId { term: TERM, node_id: 0, index });
        let _outcome = applied.expect("the command applies");
        run.commit().expect("the run commits");
    }
}

fn some_commands() -> Vec<Kind> {
    let lines = [
        "lease grant 7 60",
        "put a 1 lease=7",
        "put b 2",
        "txn (value a = 1) then (put c 3) (del b) else (put d 4)",
        "put a 5",
        "compact 3",
        "del a..z",
        "lease revoke 7",
        "alarm activate 9 1",
        "put a 6",
    ];
    lines.iter().map(|line| command(&words(line))).collect()
}

/// The same log must give the same hash in every build of one recipe: members of different builds are compared.
#[test]
fn the_hash_of_a_log_is_what_it_was() {
    let dir = tempfile::tempdir().expect("a directory");
    let state = open(dir.path());
    apply_all(&state, 0, some_commands());
    let trail = state.trails.read().last();
    let expected = Trail { origin: 0, next: 10, hash: 10_626_933_173_190_849_306 };
    assert_eq!(trail, expected, "if it has to change, raise Trail::RECIPE");
}

#[test]
fn a_store_whose_last_entries_another_build_applied_begins_a_trail_where_it_stands() {
    let dir = tempfile::tempdir().expect("a directory");
    let state = open(dir.path());
    apply_all(&state, 0, some_commands());
    let store = state.store();
    let mut batch = store.engine().batch();
    let position = LogId { term: TERM, node_id: 0, index: 20 };
    batch.note(MetaKey::Applied, &position.encode_to_vec());
    store.engine().write(batch).expect("it is written");
    let state = State::open(store).expect("it opens");
    assert_eq!(state.trails.read().last(), Trail { origin: 21, next: 21, hash: 0 });
    let set = crate::proto::skegpb::ClusterVersionSet { version: "3.7.0".to_owned() };
    apply_all(&state, 21, vec![Kind::ClusterVersionSet(set)]);
    assert_eq!(state.trails.read().last(), Trail { origin: 22, next: 22, hash: 0 }, "all begin anew there");
}

#[test]
fn a_level_that_this_build_does_not_know_is_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let state = open(dir.path());
    let store = state.store();
    let expected = "the cluster is at level 2, this build knows levels up to 1: use a newer build";
    let set = |level| Kind::ClusterLevelSet(ClusterLevelSet { level, member_ids: vec![1] });
    let position = LogId { term: TERM, node_id: 0, index: 0 };
    let refused =
        Run::new(&state, &store).apply(set(LEVEL + 1), None, position).expect_err("it must not go on");
    assert_eq!(refused.to_string(), expected);
    // Of which it need know nothing: the level does not rise.
    state.cluster.write().put(Member { id: 2, ..Member::default() });
    assert_eq!(
        Run::new(&state, &store).apply(set(LEVEL + 1), None, position).expect("it goes on"),
        Ok(Reply::None)
    );

    let mut batch = store.engine().batch();
    batch.put(Family::Meta, &MetaKey::ClusterLevel.encode(), &(LEVEL + 1).to_be_bytes());
    store.engine().write(batch).expect("the store works");
    let refused = State::open(store).err().expect("it is refused");
    assert_eq!(refused.to_string(), expected);
}
