//! Users and roles step by step, and the decision against a model that knows single keys alone.

use std::collections::BTreeSet;

use bytes::Bytes;

use super::*;
use crate::proto::authpb::{Permission, permission::Type};
use crate::storage::mvcc::{KeyRange, RangeEnd};

fn bytes(text: &str) -> Bytes {
    Bytes::copy_from_slice(text.as_bytes())
}

fn permission(perm_type: Type, key: &str, range_end: &str) -> Option<Permission> {
    Some(Permission { perm_type: perm_type as i32, key: bytes(key), range_end: bytes(range_end) })
}

fn who(name: &str, auth_revision: u64) -> Identity {
    Identity { name: name.to_owned(), auth_revision }
}

fn read(key: &str, range_end: &str) -> Access {
    Access::read(&bytes(key), &bytes(range_end))
}

fn write(key: &str, range_end: &str) -> Access {
    Access::write(&bytes(key), &bytes(range_end))
}

/// `root`, and `alice` with a role `r`, and authentication on.
fn enabled() -> Auth {
    let mut auth = Auth::default();
    auth.add_user(ROOT_USER, bytes("hash"), false).unwrap();
    auth.grant_role(ROOT_USER, ROOT_ROLE).unwrap();
    auth.add_user("alice", bytes("hash"), false).unwrap();
    auth.add_role("r").unwrap();
    auth.grant_role("alice", "r").unwrap();
    auth.enable().unwrap();
    auth
}

#[test]
fn authentication_is_on_only_with_somebody_who_can_turn_it_off() {
    let mut auth = Auth::default();
    assert_eq!(auth.enable(), Err(AuthError::RootUserNotExist));
    auth.add_user(ROOT_USER, Bytes::new(), true).unwrap();
    assert_eq!(auth.enable(), Err(AuthError::RootRoleNotExist));
    auth.grant_role(ROOT_USER, ROOT_ROLE).unwrap();
    assert_eq!((auth.revision(), auth.enable().unwrap().len(), auth.revision()), (3, 1, 3));
    assert_eq!(auth.enable(), Ok(vec![]));
    assert_eq!(auth.delete_user(ROOT_USER), Err(AuthError::InvalidAuthMgmt));
    assert_eq!(auth.revoke_role(ROOT_USER, ROOT_ROLE), Err(AuthError::InvalidAuthMgmt));
    assert_eq!(auth.delete_role(ROOT_ROLE), Err(AuthError::InvalidAuthMgmt));
    auth.disable().unwrap();
    assert_eq!((auth.revision(), auth.disable()), (4, Ok(vec![])));
    assert!(auth.delete_user(ROOT_USER).is_ok());
}

#[test]
fn every_change_is_one_revision_and_what_changes_nothing_is_none() {
    let mut auth = enabled();
    let at = auth.revision();
    assert_eq!(auth.grant_role("alice", "r"), Ok(vec![]));
    assert_eq!(auth.grant_role("alice", "s"), Err(AuthError::RoleNotFound));
    assert_eq!(auth.grant_role("bob", "r"), Err(AuthError::UserNotFound));
    assert_eq!(auth.add_user("", Bytes::new(), false), Err(AuthError::UserEmpty));
    assert_eq!(auth.add_user("alice", Bytes::new(), false), Err(AuthError::UserAlreadyExist));
    assert_eq!(auth.add_role(""), Err(AuthError::RoleEmpty));
    assert_eq!(auth.add_role("r"), Err(AuthError::RoleAlreadyExist));
    assert_eq!(auth.revoke_role("alice", "s"), Err(AuthError::RoleNotGranted));
    assert_eq!(auth.grant_permission("r", None), Err(AuthError::PermissionNotGiven));
    for (key, end) in [("", ""), ("b", "a"), ("b", "b"), ("", "\0")] {
        assert_eq!(
            auth.grant_permission("r", permission(Type::Read, key, end)),
            Err(AuthError::InvalidAuthMgmt)
        );
    }
    assert_eq!(auth.revoke_permission("r", &bytes("a"), &bytes("")), Err(AuthError::PermissionNotGranted));
    assert_eq!(auth.change_password("alice", None), Err(AuthError::NoPasswordUser));
    assert_eq!(auth.revision(), at);
    auth.grant_permission("r", permission(Type::Read, "a", "")).unwrap();
    auth.change_password("alice", Some(bytes("other"))).unwrap();
    auth.delete_role("r").unwrap();
    auth.delete_user("alice").unwrap();
    assert_eq!(auth.revision(), at + 4);
}

#[test]
fn a_permission_is_replaced_by_one_for_the_same_range() {
    let mut auth = enabled();
    auth.grant_permission("r", permission(Type::Read, "b", "")).unwrap();
    auth.grant_permission("r", permission(Type::Readwrite, "a", "")).unwrap();
    auth.grant_permission("r", permission(Type::Readwrite, "a", "c")).unwrap();
    auth.grant_permission("r", permission(Type::Read, "a", "c")).unwrap();
    let held = auth.role_permissions("r").unwrap();
    let shown: Vec<_> =
        held.iter().map(|held| (&held.key[..], &held.range_end[..], held.perm_type)).collect();
    assert_eq!(shown, [(&b"a"[..], &b""[..], 2), (b"a", b"c", 0), (b"b", b"", 0)]);
    let who = who("alice", auth.revision());
    let denied = auth.authorise(Some(&who), &Demand::Keys(vec![write("b", "")]));
    assert_eq!(denied, Err(AuthError::PermissionDenied), "the right to write there was taken back");
}

#[test]
fn permissions_of_all_roles_count_together() {
    let mut auth = enabled();
    auth.add_role("s").unwrap();
    auth.grant_role("alice", "s").unwrap();
    auth.grant_permission("r", permission(Type::Read, "a", "c")).unwrap();
    auth.grant_permission("s", permission(Type::Readwrite, "c", "e")).unwrap();
    auth.grant_permission("s", permission(Type::Write, "x", "\0")).unwrap();
    let who = who("alice", auth.revision());
    for (access, allowed) in [
        (read("a", "e"), true),
        (read("a", "e\0"), false),
        (read("b", ""), true),
        (read("e", ""), false),
        (read("a", "\0"), false),
        (write("c", "e"), true),
        (write("b", "d"), false),
        (write("y", "\0"), true),
        (write("y", "z"), true),
        (read("y", ""), false),
    ] {
        let decided = auth.authorise(Some(&who), &Demand::Keys(vec![access.clone()]));
        assert_eq!(decided.is_ok(), allowed, "{access:?}");
    }
    auth.delete_role("s").unwrap();
    let old = auth.authorise(Some(&who), &Demand::Keys(vec![read("b", "")]));
    assert_eq!(old, Err(AuthError::AuthOldRevision));
}

#[test]
fn who_is_not_known_may_nothing_and_root_everything() {
    let auth = enabled();
    let now = auth.revision();
    let keys = || Demand::Keys(vec![read("a", "")]);
    let attached = || Demand::AttachedKeys(vec![write("a", "")]);
    let root = who(ROOT_USER, now);
    for demand in [
        Demand::Known,
        Demand::Root,
        Demand::User("alice".into()),
        Demand::Holder("r".into()),
        keys(),
        attached(),
    ] {
        assert_eq!(auth.authorise(None, &demand), Err(AuthError::UserEmpty), "{demand:?}");
        assert_eq!(auth.authorise(Some(&who("", now)), &demand), Err(AuthError::UserEmpty), "{demand:?}");
        assert_eq!(auth.authorise(Some(&root), &demand), Ok(()), "{demand:?}");
    }
    let (alice, gone) = (who("alice", now), who("gone", now));
    for (who, demand, decided) in [
        (&alice, Demand::Known, Ok(())),
        (&alice, Demand::Root, Err(AuthError::PermissionDenied)),
        (&alice, Demand::User("alice".into()), Ok(())),
        (&alice, Demand::User("root".into()), Err(AuthError::PermissionDenied)),
        (&alice, Demand::Holder("r".into()), Ok(())),
        (&alice, Demand::Holder("root".into()), Err(AuthError::PermissionDenied)),
        (&alice, keys(), Err(AuthError::PermissionDenied)),
        (&alice, attached(), Err(AuthError::PermissionDenied)),
        (&alice, Demand::AttachedKeys(vec![]), Ok(())),
        (&gone, Demand::Known, Ok(())),
        (&gone, Demand::Root, Err(AuthError::UserNotFound)),
        (&gone, keys(), Err(AuthError::PermissionDenied)),
        (&who("alice", 0), keys(), Err(AuthError::UserEmpty)),
        (&who(ROOT_USER, now - 1), keys(), Err(AuthError::AuthOldRevision)),
        (&who(ROOT_USER, now - 1), attached(), Ok(())),
        (&who(ROOT_USER, now - 1), Demand::Root, Ok(())),
    ] {
        assert_eq!(auth.authorise(Some(who), &demand), decided, "{who:?} {demand:?}");
    }
    assert_eq!(auth.authorise(None, &Demand::Nothing), Ok(()));
    assert_eq!(Auth::default().authorise(None, &Demand::Root), Ok(()), "authentication is off");
}

#[test]
fn a_read_across_a_change_is_not_shown() {
    let mut auth = enabled();
    let alice = who("alice", auth.revision());
    assert_eq!(auth.check_unchanged(Some(&alice)), Ok(()));
    auth.add_role("s").unwrap();
    assert_eq!(auth.check_unchanged(Some(&alice)), Err(AuthError::AuthOldRevision));
    assert_eq!(auth.check_unchanged(None), Ok(()));
}

/// All keys of up to two letters of `a`, `b`, `c`: every range of keys in this test begins and ends at one of them.
fn universe() -> Vec<Bytes> {
    let letters = [b'a', b'b', b'c'];
    let mut keys: Vec<Bytes> = letters.iter().map(|a| Bytes::copy_from_slice(&[*a])).collect();
    keys.extend(letters.iter().flat_map(|a| letters.iter().map(|b| Bytes::copy_from_slice(&[*a, *b]))));
    keys.sort();
    keys
}

/// What lies between two neighbours of the universe is one place; a key itself is another.
fn places(range: &KeyRange, keys: &[Bytes]) -> BTreeSet<usize> {
    let mut places = BTreeSet::new();
    for (i, key) in keys.iter().enumerate() {
        let behind = Bytes::from([&key[..], b"\0"].concat());
        if range.contains(key) {
            places.insert(2 * i);
        }
        if range.contains(&behind) {
            places.insert(2 * i + 1);
        }
    }
    places
}

/// Random users, roles, permissions and changes of them; every decision is compared with sets of places.
#[test]
fn decisions_are_those_of_a_model_of_single_keys() {
    let keys = universe();
    let mut random = fastrand::Rng::with_seed(11);
    let range = |random: &mut fastrand::Rng| loop {
        let end = match random.u8(..5) {
            0 => RangeEnd::Unbounded,
            1 | 2 => RangeEnd::Single,
            _ => RangeEnd::Before(keys[random.usize(..keys.len())].clone()),
        };
        let range = KeyRange { start: keys[random.usize(..keys.len())].clone(), end };
        if !range.is_empty() {
            break range;
        }
    };
    let end_of = |range: &KeyRange| match &range.end {
        RangeEnd::Single => Bytes::new(),
        RangeEnd::Unbounded => Bytes::from_static(b"\0"),
        RangeEnd::Before(end) => end.clone(),
    };
    let roles = ["r", "s", "t"];
    let (mut allowed, mut denied) = (0, 0);
    for _ in 0..60 {
        let mut auth = enabled();
        for role in &roles[1..] {
            auth.add_role(role).unwrap();
        }
        // Role to its permissions, and the roles that alice holds.
        let mut granted: BTreeMap<&str, Vec<(KeyRange, i32)>> = BTreeMap::new();
        let mut held = BTreeSet::from(["r"]);
        for _ in 0..40 {
            let role = roles[random.usize(..roles.len())];
            let range = range(&mut random);
            let permissions = granted.entry(role).or_default();
            match random.u8(..8) {
                0..4 => {
                    let kind = i32::from(random.u8(..3));
                    permissions.retain(|(other, _)| *other != range);
                    permissions.push((range.clone(), kind));
                    let permission =
                        Permission { perm_type: kind, key: range.start.clone(), range_end: end_of(&range) };
                    auth.grant_permission(role, Some(permission)).unwrap();
                }
                4 if !permissions.is_empty() => {
                    let (range, _) = permissions.remove(random.usize(..permissions.len()));
                    auth.revoke_permission(role, &range.start, &end_of(&range)).unwrap();
                }
                5 => {
                    held.insert(role);
                    auth.grant_role("alice", role).unwrap();
                }
                6 if held.remove(role) => {
                    auth.revoke_role("alice", role).unwrap();
                }
                7 if random.u8(..4) == 0 => {
                    granted.remove(role);
                    held.remove(role);
                    auth.delete_role(role).unwrap();
                    auth.add_role(role).unwrap();
                }
                _ => {}
            }
            let asked = asked_for(&mut random, &keys);
            let alice = who("alice", auth.revision());
            let may = |right: Right| -> BTreeSet<usize> {
                let kinds: &[i32] = if right == Right::Read { &[0, 2] } else { &[1, 2] };
                let permissions = held.iter().filter_map(|role| granted.get(role)).flatten();
                permissions
                    .filter(|(_, kind)| kinds.contains(kind))
                    .flat_map(|(range, _)| places(range, &keys))
                    .collect()
            };
            let expected =
                asked.iter().all(|access| places(&access.range, &keys).is_subset(&may(access.right)));
            let decided = auth.authorise(Some(&alice), &Demand::Keys(asked.clone())).is_ok();
            assert_eq!(decided, expected, "{asked:?} with {granted:?}, held {held:?}");
            if decided { allowed += 1 } else { denied += 1 }
        }
    }
    assert!(allowed > 200 && denied > 200, "{allowed} allowed, {denied} denied");
}

/// One to three accesses to ranges that hold a key.
fn asked_for(random: &mut fastrand::Rng, keys: &[Bytes]) -> Vec<Access> {
    let mut asked = Vec::new();
    for _ in 0..random.usize(1..3) {
        let right = if random.bool() { Right::Read } else { Right::Write };
        let start = random.usize(..keys.len());
        let end = match random.u8(..6) {
            0 => RangeEnd::Unbounded,
            1..4 => RangeEnd::Single,
            _ if start + 1 < keys.len() => {
                RangeEnd::Before(keys[random.usize(start + 1..keys.len())].clone())
            }
            _ => RangeEnd::Single,
        };
        asked.push(Access { right, range: KeyRange { start: keys[start].clone(), end } });
    }
    asked
}
