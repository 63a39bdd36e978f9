//! The replicated view of the cluster: members, alarms, cluster version and level.

pub mod id;
pub mod level;

use std::collections::{BTreeMap, BTreeSet};

use prost::Message;

use crate::proto::etcdserverpb::{AlarmMember, AlarmType};
use crate::proto::skegpb::{Member, MemberAttributes};
use crate::storage::schema::{Family, MetaKey};
use crate::storage::{Engine, StorageError};

/// Members, alarms, version and level as of the applied log.
#[derive(Debug, Default)]
pub struct Cluster {
    members: BTreeMap<u64, Member>,
    removed: BTreeSet<u64>,
    alarms: BTreeSet<(u64, i32)>,
    version: Option<String>,
    downgrade: Option<String>,
    level: u32,
}

impl Cluster {
    /// All members by id.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.members.values()
    }

    /// A member by id.
    pub fn member(&self, id: u64) -> Option<&Member> {
        self.members.get(&id)
    }

    /// True before the founding members are known.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Adds a member or replaces what is known of it.
    pub fn put(&mut self, member: Member) {
        self.members.insert(member.id, member);
    }

    /// Ends a membership for good; `None` if there is none.
    pub fn remove(&mut self, id: u64) -> Option<Member> {
        let member = self.members.remove(&id)?;
        self.removed.insert(id);
        Some(member)
    }

    /// True for a member that there once was.
    pub fn is_removed(&self, id: u64) -> bool {
        self.removed.contains(&id)
    }

    /// True if a member other than `except` has one of the peer URLs.
    pub fn uses_any(&self, peer_urls: &[String], except: Option<u64>) -> bool {
        self.members
            .values()
            .filter(|member| Some(member.id) != except)
            .any(|member| member.peer_urls.iter().any(|url| peer_urls.contains(url)))
    }

    /// Publishes a member's name and client URLs; `None` if it is not a member.
    pub fn set_attributes(&mut self, attributes: &MemberAttributes) -> Option<Member> {
        let member = self.members.get_mut(&attributes.member_id)?;
        member.name.clone_from(&attributes.name);
        member.client_urls.clone_from(&attributes.client_urls);
        Some(member.clone())
    }

    /// The cluster version, `major.minor.0`; `None` until decided.
    pub fn version(&self) -> Option<&str> {
        self.version.as_deref()
    }

    /// Sets the cluster version.
    pub fn set_version(&mut self, version: &str) {
        self.version = Some(version.to_owned());
    }

    /// The version that a downgrade under way goes to, `major.minor.0`.
    pub fn downgrade_target(&self) -> Option<&str> {
        self.downgrade.as_deref()
    }

    /// Begins a downgrade to a version, or ends it when that is empty.
    pub fn set_downgrade(&mut self, target: &str) {
        self.downgrade = (!target.is_empty()).then(|| target.to_owned());
    }

    /// True if any member has raised the alarm.
    pub fn is_raised(&self, alarm: AlarmType) -> bool {
        self.alarms.iter().any(|(_, raised)| *raised == alarm as i32)
    }

    /// True if this member has raised the alarm.
    pub fn has_raised(&self, member_id: u64, alarm: AlarmType) -> bool {
        self.alarms.contains(&(member_id, alarm as i32))
    }

    /// True for a member without a vote.
    pub fn is_learner(&self, member_id: u64) -> bool {
        self.members.get(&member_id).is_some_and(|member| member.is_learner)
    }

    /// Raised alarms of a type; all of them for type NONE.
    pub fn alarms_of_type(&self, alarm: i32) -> Vec<AlarmMember> {
        self.alarms
            .iter()
            .filter(|(_, raised)| alarm == AlarmType::None as i32 || *raised == alarm)
            .map(|(member_id, alarm)| AlarmMember { member_id: *member_id, alarm: *alarm })
            .collect()
    }

    /// Raises an alarm for a member.
    pub fn raise(&mut self, member_id: u64, alarm: i32) -> AlarmMember {
        self.alarms.insert((member_id, alarm));
        AlarmMember { member_id, alarm }
    }

    /// Clears exactly this alarm; `None` if it was not raised.
    pub fn clear(&mut self, member_id: u64, alarm: i32) -> Option<AlarmMember> {
        self.alarms.remove(&(member_id, alarm)).then_some(AlarmMember { member_id, alarm })
    }
}

/// Reads the cluster's records.
pub fn load(engine: &Engine) -> Result<Cluster, StorageError> {
    let mut cluster = Cluster::default();
    for_each(engine, MetaKey::MEMBER_PREFIX, |_, value| {
        let member = Member::decode(value).map_err(|_| StorageError::Damaged { what: "member" })?;
        cluster.members.insert(member.id, member);
        Ok(())
    })?;
    for_each(engine, MetaKey::REMOVED_PREFIX, |key, _| {
        let id = MetaKey::decode_removed(key).ok_or(StorageError::Damaged { what: "removed member" })?;
        cluster.removed.insert(id);
        Ok(())
    })?;
    for_each(engine, MetaKey::ALARM_PREFIX, |key, _| {
        let alarm = MetaKey::decode_alarm(key).ok_or(StorageError::Damaged { what: "alarm" })?;
        cluster.alarms.insert(alarm);
        Ok(())
    })?;
    if let Some(version) = engine.get(Family::Meta, &MetaKey::ClusterVersion.encode())? {
        let version = std::str::from_utf8(&version);
        cluster.set_version(version.map_err(|_| StorageError::Damaged { what: "cluster version" })?);
    }
    if let Some(target) = engine.get(Family::Meta, &MetaKey::Downgrade.encode())? {
        let target = std::str::from_utf8(&target);
        cluster.set_downgrade(target.map_err(|_| StorageError::Damaged { what: "downgrade" })?);
    }
    cluster.level = level::load(engine)?;
    Ok(cluster)
}

fn for_each(
    engine: &Engine,
    prefix: &[u8],
    mut visit: impl FnMut(&[u8], &[u8]) -> Result<(), StorageError>,
) -> Result<(), StorageError> {
    let mut iterator = engine.iterate(Family::Meta, prefix, None);
    while let Some((key, value)) = iterator.item() {
        if !key.starts_with(prefix) {
            break;
        }
        visit(key, value)?;
        iterator.next();
    }
    Ok(iterator.status()?)
}
