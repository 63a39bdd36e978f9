//! Every method of etcd's API: which there are, and their counters.

use std::sync::{Arc, OnceLock};

use tonic::Status;

use crate::telemetry::metrics::MethodKind::{self, BidiStream, ServerStream, Unary};
use crate::telemetry::metrics::{Grpc, MethodCounters};
use Rule::{ByRequest, Known, Open, Root};

/// One service of the API.
struct Service {
    name: &'static str,
    /// Its counters are exported from the start.
    counted_from_start: bool,
    methods: &'static [(&'static str, MethodKind, Rule)],
}

/// What a call demands of its caller while authentication is on; there is none without a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rule {
    /// Nothing.
    Open,
    /// It must be known who asks; what else, depends on the request.
    Known,
    /// The role `root`.
    Root,
    /// It depends on the request alone: who serves the call asks.
    ByRequest,
}

const SERVICES: [Service; 9] = [
    Service {
        name: "etcdserverpb.KV",
        counted_from_start: true,
        methods: &[
            ("Range", Unary, ByRequest),
            ("Put", Unary, ByRequest),
            ("Txn", Unary, ByRequest),
            ("DeleteRange", Unary, ByRequest),
            ("Compact", Unary, Root),
            ("RangeStream", ServerStream, ByRequest),
        ],
    },
    Service {
        name: "etcdserverpb.Lease",
        counted_from_start: true,
        methods: &[
            ("LeaseGrant", Unary, Known),
            ("LeaseRevoke", Unary, Known),
            ("LeaseKeepAlive", BidiStream, ByRequest),
            ("LeaseTimeToLive", Unary, Known),
            ("LeaseLeases", Unary, Known),
        ],
    },
    Service {
        name: "etcdserverpb.Watch",
        counted_from_start: true,
        methods: &[("Watch", BidiStream, ByRequest)],
    },
    Service {
        name: "etcdserverpb.Cluster",
        counted_from_start: true,
        methods: &[
            ("MemberAdd", Unary, Root),
            ("MemberRemove", Unary, Root),
            ("MemberUpdate", Unary, Root),
            ("MemberList", Unary, Known),
            ("MemberPromote", Unary, Root),
        ],
    },
    Service {
        name: "etcdserverpb.Maintenance",
        counted_from_start: true,
        methods: &[
            ("Alarm", Unary, ByRequest),
            ("Status", Unary, Known),
            ("Defragment", Unary, Root),
            ("Hash", Unary, Root),
            ("HashKV", Unary, Root),
            ("Snapshot", ServerStream, Root),
            ("MoveLeader", Unary, Root),
            ("Downgrade", Unary, Root),
        ],
    },
    Service {
        name: "grpc.health.v1.Health",
        counted_from_start: true,
        methods: &[("Check", Unary, Open), ("List", Unary, Open), ("Watch", ServerStream, Open)],
    },
    Service {
        name: "etcdserverpb.Auth",
        counted_from_start: true,
        methods: &[
            ("AuthEnable", Unary, Root),
            ("AuthDisable", Unary, Root),
            ("AuthStatus", Unary, Open),
            ("Authenticate", Unary, Open),
            ("UserAdd", Unary, Root),
            ("UserGet", Unary, ByRequest),
            ("UserList", Unary, Root),
            ("UserDelete", Unary, Root),
            ("UserChangePassword", Unary, Root),
            ("UserGrantRole", Unary, Root),
            ("UserRevokeRole", Unary, Root),
            ("RoleAdd", Unary, Root),
            ("RoleGet", Unary, ByRequest),
            ("RoleList", Unary, Root),
            ("RoleDelete", Unary, Root),
            ("RoleGrantPermission", Unary, Root),
            ("RoleRevokePermission", Unary, Root),
        ],
    },
    Service {
        name: "v3lockpb.Lock",
        counted_from_start: false,
        methods: &[("Lock", Unary, ByRequest), ("Unlock", Unary, ByRequest)],
    },
    Service {
        name: "v3electionpb.Election",
        counted_from_start: false,
        methods: &[
            ("Campaign", Unary, ByRequest),
            ("Proclaim", Unary, ByRequest),
            ("Leader", Unary, ByRequest),
            ("Observe", ServerStream, ByRequest),
            ("Resign", Unary, ByRequest),
        ],
    },
];

/// A method that exists, as a place in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Method {
    service: usize,
    method: usize,
}

impl Method {
    /// Finds the method that a path names.
    ///
    /// # Errors
    /// UNIMPLEMENTED in grpc-go's words for what does not exist.
    pub(super) fn find(path: &str) -> Result<Method, Status> {
        let Some((service, method)) = path.strip_prefix('/').and_then(|path| path.rsplit_once('/')) else {
            return Err(Status::unimplemented(format!("malformed method name: {path:?}")));
        };
        let Some(at) = SERVICES.iter().position(|known| known.name == service) else {
            return Err(Status::unimplemented(format!("unknown service {service}")));
        };
        match SERVICES[at].methods.iter().position(|(known, ..)| *known == method) {
            Some(method) => Ok(Method { service: at, method }),
            None => Err(Status::unimplemented(format!("unknown method {method} for service {service}"))),
        }
    }

    /// The service it belongs to.
    pub(super) fn service(self) -> &'static str {
        SERVICES[self.service].name
    }

    /// Who streams.
    pub(super) fn kind(self) -> MethodKind {
        SERVICES[self.service].methods[self.method].1
    }

    /// What it demands of its caller.
    pub(super) fn rule(self) -> Rule {
        SERVICES[self.service].methods[self.method].2
    }

    /// True for what a learner may be asked; a range is judged by its request.
    pub(super) fn is_served_by_learners(self) -> bool {
        let service = &SERVICES[self.service];
        matches!(
            (service.name, service.methods[self.method].0),
            ("etcdserverpb.KV", "Range") | ("etcdserverpb.Maintenance", "Status" | "Snapshot")
        )
    }

    /// True for what is answered from the keys, or users and roles, stored here, or changes them. Renewing a lease does neither.
    pub(super) fn needs_keys(self) -> bool {
        let service = &SERVICES[self.service];
        match (service.name, service.methods[self.method].0) {
            (
                "etcdserverpb.KV"
                | "etcdserverpb.Watch"
                | "etcdserverpb.Auth"
                | "v3lockpb.Lock"
                | "v3electionpb.Election",
                _,
            )
            | ("etcdserverpb.Maintenance", "Snapshot") => true,
            ("etcdserverpb.Lease", method) => method != "LeaseKeepAlive",
            _ => false,
        }
    }

    /// True for a call with one answer that may be a long time coming.
    pub(super) fn waits(self) -> bool {
        matches!(self.service(), "v3lockpb.Lock" | "v3electionpb.Election")
    }
}

/// The counters of every method.
pub(super) struct Methods {
    counters: [Vec<OnceLock<Arc<MethodCounters>>>; SERVICES.len()],
}

impl Methods {
    /// Makes the counters that are exported from the start.
    pub(super) fn new(grpc: &Grpc) -> Methods {
        let counters = SERVICES.map(|service| {
            let slots = service.methods.iter().map(|(name, kind, _)| {
                let slot = OnceLock::new();
                if service.counted_from_start {
                    slot.get_or_init(|| Arc::new(grpc.method(*kind, service.name, name)));
                }
                slot
            });
            slots.collect()
        });
        Methods { counters }
    }

    /// The counters of one method.
    pub(super) fn counters(&self, grpc: &Grpc, method: Method) -> Arc<MethodCounters> {
        let slot = &self.counters[method.service][method.method];
        let make = || {
            let service = &SERVICES[method.service];
            let (name, kind, _) = service.methods[method.method];
            Arc::new(grpc.method(kind, service.name, name))
        };
        Arc::clone(slot.get_or_init(make))
    }
}

#[cfg(test)]
mod tests {
    use super::{Method, Methods, Rule, SERVICES};
    use crate::telemetry::metrics::Metrics;

    #[test]
    fn a_path_names_a_method_or_is_refused_in_grpc_gos_words() {
        let found = Method::find("/etcdserverpb.KV/Txn").unwrap();
        assert_eq!((found.service(), found.rule()), ("etcdserverpb.KV", Rule::ByRequest));
        assert_eq!(Method::find("/etcdserverpb.KV/Compact").unwrap().rule(), Rule::Root);
        for (path, text) in [
            ("/etcdserverpb.KV/Nope", "unknown method Nope for service etcdserverpb.KV"),
            ("/a.B/C", "unknown service a.B"),
            ("nothing", "malformed method name: \"nothing\""),
        ] {
            assert_eq!(Method::find(path).unwrap_err().message(), text);
        }
    }

    #[test]
    fn what_needs_keys_and_what_does_not() {
        let needing = |path: &str| Method::find(path).unwrap().needs_keys();
        for path in ["KV/Range", "KV/RangeStream", "Watch/Watch", "Lease/LeaseLeases", "Maintenance/Snapshot"]
        {
            assert!(needing(&format!("/etcdserverpb.{path}")), "{path}");
        }
        assert!(needing("/v3lockpb.Lock/Lock") && needing("/v3electionpb.Election/Observe"));
        for path in ["Lease/LeaseKeepAlive", "Maintenance/Status", "Maintenance/HashKV", "Cluster/MemberList"]
        {
            assert!(!needing(&format!("/etcdserverpb.{path}")), "{path}");
        }
        assert!(!needing("/grpc.health.v1.Health/Check"));
    }

    #[test]
    fn all_but_lock_and_election_are_exported_from_the_start() {
        let metrics = Metrics::new(false);
        let methods = Methods::new(&metrics.grpc);
        let started =
            |text: &str| text.lines().filter(|line| line.starts_with("grpc_server_started_total")).count();
        assert_eq!(started(&metrics.text()), 45);
        methods.counters(&metrics.grpc, Method::find("/v3electionpb.Election/Leader").unwrap()).started.inc();
        assert_eq!(started(&metrics.text()), 46);
        assert_eq!(SERVICES.iter().map(|service| service.methods.len()).sum::<usize>(), 52);
    }
}
