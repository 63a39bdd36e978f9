//! Feature gates: named switches, each with a default and a stage, set by `--feature-gates A=true,B=false`.
//!
//! The groups `AllAlpha` and `AllBeta` set every gate of their stage that is not named itself.

use std::collections::BTreeMap;

use super::syntax::{self, ValueError};

/// How settled a gate is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Off unless asked for.
    Alpha,
    /// On unless declined.
    Beta,
}

/// A switch of etcd 3.7.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FeatureGate {
    /// Leader compares compaction hashes with its followers.
    CompactHashCheck,
    /// A keep-alive is answered without waiting for the applied index.
    FastLeaseKeepAlive,
    /// Members compare hashes before they serve.
    InitialCorruptCheck,
    /// The leader records remaining lease times with the others.
    LeaseCheckpoint,
    /// Recorded lease times outlive restarts.
    LeaseCheckpointPersist,
    /// Lease revokes keep room under overload.
    PriorityRequest,
    /// Outgoing peer connections leave from the advertised address.
    SetMemberLocalAddr,
    /// Health turns "not serving" during a defragmentation.
    StopGrpcServiceOnDefrag,
    /// Checks of a write transaction share its buffer.
    TxnModeWriteWithSharedBuffer,
}

/// The gates as they were set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FeatureGates {
    set: BTreeMap<FeatureGate, bool>,
    all_alpha: Option<bool>,
    all_beta: Option<bool>,
}

impl FeatureGate {
    /// Every gate, by name.
    pub const ALL: [Self; 9] = [
        Self::CompactHashCheck,
        Self::FastLeaseKeepAlive,
        Self::InitialCorruptCheck,
        Self::LeaseCheckpoint,
        Self::LeaseCheckpointPersist,
        Self::PriorityRequest,
        Self::SetMemberLocalAddr,
        Self::StopGrpcServiceOnDefrag,
        Self::TxnModeWriteWithSharedBuffer,
    ];

    /// Returns the name users write.
    pub fn name(self) -> &'static str {
        match self {
            Self::CompactHashCheck => "CompactHashCheck",
            Self::FastLeaseKeepAlive => "FastLeaseKeepAlive",
            Self::InitialCorruptCheck => "InitialCorruptCheck",
            Self::LeaseCheckpoint => "LeaseCheckpoint",
            Self::LeaseCheckpointPersist => "LeaseCheckpointPersist",
            Self::PriorityRequest => "PriorityRequest",
            Self::SetMemberLocalAddr => "SetMemberLocalAddr",
            Self::StopGrpcServiceOnDefrag => "StopGRPCServiceOnDefrag",
            Self::TxnModeWriteWithSharedBuffer => "TxnModeWriteWithSharedBuffer",
        }
    }

    /// Returns how settled it is.
    pub fn stage(self) -> Stage {
        match self {
            Self::FastLeaseKeepAlive | Self::TxnModeWriteWithSharedBuffer => Stage::Beta,
            _ => Stage::Alpha,
        }
    }

    /// Returns what it is when nobody sets it: on in beta, off before.
    pub fn default_value(self) -> bool {
        self.stage() == Stage::Beta
    }
}

impl FeatureGates {
    /// Says whether a gate is on.
    pub fn enabled(&self, gate: FeatureGate) -> bool {
        let group = match gate.stage() {
            Stage::Alpha => self.all_alpha,
            Stage::Beta => self.all_beta,
        };
        self.set.get(&gate).copied().or(group).unwrap_or_else(|| gate.default_value())
    }

    /// Says whether a group was switched on.
    pub fn group_enabled(&self, stage: Stage) -> bool {
        match stage {
            Stage::Alpha => self.all_alpha,
            Stage::Beta => self.all_beta,
        }
        .unwrap_or(false)
    }

    /// Returns the gates that were set by name or by group, with their values.
    pub fn explicitly_set(&self) -> impl Iterator<Item = (FeatureGate, bool)> + '_ {
        FeatureGate::ALL.into_iter().filter_map(|gate| {
            let group = match gate.stage() {
                Stage::Alpha => self.all_alpha,
                Stage::Beta => self.all_beta,
            };
            self.set.get(&gate).copied().or(group).map(|value| (gate, value))
        })
    }

    /// Takes in `A=true,B=false`; what was set before stays unless named again.
    pub(super) fn set(&mut self, text: &str) -> Result<(), ValueError> {
        for pair in text.split(',').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let name = name.trim();
            if !pair.contains('=') {
                return Err(ValueError::new(format!("missing bool value for {name}")));
            }
            let on = syntax::boolean(value.trim()).map_err(|error| {
                ValueError::new(format!("invalid value of {name}={}: {error}", value.trim()))
            })?;
            match name {
                "AllAlpha" => self.all_alpha = Some(on),
                "AllBeta" => self.all_beta = Some(on),
                _ => {
                    let gate = FeatureGate::ALL
                        .into_iter()
                        .find(|gate| gate.name() == name)
                        .ok_or_else(|| ValueError::new(format!("unrecognized feature gate: {name}")))?;
                    self.set.insert(gate, on);
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::{FeatureGate, FeatureGates};

    fn gates(text: &str) -> FeatureGates {
        let mut gates = FeatureGates::default();
        gates.set(text).unwrap();
        gates
    }

    #[test]
    fn beta_is_on_and_alpha_off_by_default() {
        let gates = FeatureGates::default();
        assert!(gates.enabled(FeatureGate::FastLeaseKeepAlive));
        assert!(!gates.enabled(FeatureGate::InitialCorruptCheck));
        assert_eq!(gates.explicitly_set().count(), 0);
    }

    #[test]
    fn a_name_beats_its_group_in_either_order() {
        for text in ["AllAlpha=true,LeaseCheckpoint=false", "LeaseCheckpoint=false,AllAlpha=true"] {
            assert!(!gates(text).enabled(FeatureGate::LeaseCheckpoint), "{text}");
            assert!(gates(text).enabled(FeatureGate::CompactHashCheck), "{text}");
            assert!(gates(text).enabled(FeatureGate::FastLeaseKeepAlive), "{text}");
        }
        assert!(!gates("AllBeta=false").enabled(FeatureGate::FastLeaseKeepAlive));
    }

    #[test]
    fn later_settings_add_to_earlier_ones() {
        let mut gates = gates(" InitialCorruptCheck = t ,");
        gates.set("LeaseCheckpoint=1").unwrap();
        assert_eq!(gates.explicitly_set().count(), 2);
    }

    #[test]
    fn nonsense_is_refused_by_name() {
        for (text, part) in [
            ("Bogus=true", "Bogus"),
            ("LeaseCheckpoint", "missing bool value for LeaseCheckpoint"),
            ("LeaseCheckpoint=yes", "LeaseCheckpoint=yes"),
        ] {
            let error = FeatureGates::default().set(text).unwrap_err();
            assert!(error.0.contains(part), "{error}");
        }
    }
}
