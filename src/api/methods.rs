//! Every method of etcd's API: which there are, which are served, and their counters.

use std::sync::{Arc, OnceLock};

use tonic::Status;

use super::later;
use crate::telemetry::metrics::MethodKind::{self, BidiStream, ServerStream, Unary};
use crate::telemetry::metrics::{Grpc, MethodCounters};

/// One service of the API.
struct Service {
    name: &'static str,
    /// Comes later if false.
    served: bool,
    /// Its counters are exported from the start.
    counted_from_start: bool,
    methods: &'static [(&'static str, MethodKind)],
}

const SERVICES: [Service; 9] = [
    Service {
        name: "etcdserverpb.KV",
        served: true,
        counted_from_start: true,
        methods: &[
            ("Range", Unary),
            ("Put", Unary),
            ("Txn", Unary),
            ("DeleteRange", Unary),
            ("Compact", Unary),
            ("RangeStream", ServerStream),
        ],
    },
    Service {
        name: "etcdserverpb.Lease",
        served: true,
        counted_from_start: true,
        methods: &[
            ("LeaseGrant", Unary),
            ("LeaseRevoke", Unary),
            ("LeaseKeepAlive", BidiStream),
            ("LeaseTimeToLive", Unary),
            ("LeaseLeases", Unary),
        ],
    },
    Service {
        name: "etcdserverpb.Watch",
        served: true,
        counted_from_start: true,
        methods: &[("Watch", BidiStream)],
    },
    Service {
        name: "etcdserverpb.Cluster",
        served: true,
        counted_from_start: true,
        methods: &[
            ("MemberAdd", Unary),
            ("MemberRemove", Unary),
            ("MemberUpdate", Unary),
            ("MemberList", Unary),
            ("MemberPromote", Unary),
        ],
    },
    Service {
        name: "etcdserverpb.Maintenance",
        served: true,
        counted_from_start: true,
        methods: &[
            ("Alarm", Unary),
            ("Status", Unary),
            ("Defragment", Unary),
            ("Hash", Unary),
            ("HashKV", Unary),
            ("Snapshot", ServerStream),
            ("MoveLeader", Unary),
            ("Downgrade", Unary),
        ],
    },
    Service {
        name: "grpc.health.v1.Health",
        served: true,
        counted_from_start: true,
        methods: &[("Check", Unary), ("List", Unary), ("Watch", ServerStream)],
    },
    Service {
        name: "etcdserverpb.Auth",
        served: false,
        counted_from_start: true,
        methods: &[
            ("AuthEnable", Unary),
            ("AuthDisable", Unary),
            ("AuthStatus", Unary),
            ("Authenticate", Unary),
            ("UserAdd", Unary),
            ("UserGet", Unary),
            ("UserList", Unary),
            ("UserDelete", Unary),
            ("UserChangePassword", Unary),
            ("UserGrantRole", Unary),
            ("UserRevokeRole", Unary),
            ("RoleAdd", Unary),
            ("RoleGet", Unary),
            ("RoleList", Unary),
            ("RoleDelete", Unary),
            ("RoleGrantPermission", Unary),
            ("RoleRevokePermission", Unary),
        ],
    },
    Service {
        name: "v3lockpb.Lock",
        served: true,
        counted_from_start: false,
        methods: &[("Lock", Unary), ("Unlock", Unary)],
    },
    Service {
        name: "v3electionpb.Election",
        served: true,
        counted_from_start: false,
        methods: &[
            ("Campaign", Unary),
            ("Proclaim", Unary),
            ("Leader", Unary),
            ("Observe", ServerStream),
            ("Resign", Unary),
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
        match SERVICES[at].methods.iter().position(|(known, _)| *known == method) {
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

    /// True for what a learner may be asked; a range is judged by its request.
    pub(super) fn is_served_by_learners(self) -> bool {
        let service = &SERVICES[self.service];
        matches!(
            (service.name, service.methods[self.method].0),
            ("etcdserverpb.KV", "Range") | ("etcdserverpb.Maintenance", "Status" | "Snapshot")
        )
    }

    /// True for what is answered from the keys stored here, or changes them. Renewing a lease does neither.
    pub(super) fn needs_keys(self) -> bool {
        let service = &SERVICES[self.service];
        match (service.name, service.methods[self.method].0) {
            ("etcdserverpb.KV" | "etcdserverpb.Watch" | "v3lockpb.Lock" | "v3electionpb.Election", _)
            | ("etcdserverpb.Maintenance", "Snapshot") => true,
            ("etcdserverpb.Lease", method) => method != "LeaseKeepAlive",
            _ => false,
        }
    }

    /// True for a call with one answer that may be a long time coming.
    pub(super) fn waits(self) -> bool {
        matches!(self.service(), "v3lockpb.Lock" | "v3electionpb.Election")
    }

    /// Its answer if it comes later.
    pub(super) fn check_served(self) -> Result<(), Status> {
        let service = &SERVICES[self.service];
        if service.served {
            return Ok(());
        }
        Err(later::not_yet(&format!("{}/{}", service.name, service.methods[self.method].0)))
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
            let slots = service.methods.iter().map(|(name, kind)| {
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
            let (name, kind) = service.methods[method.method];
            Arc::new(grpc.method(kind, service.name, name))
        };
        Arc::clone(slot.get_or_init(make))
    }
}

#[cfg(test)]
mod tests {
    use super::{Method, Methods, SERVICES};
    use crate::telemetry::metrics::Metrics;

    #[test]
    fn a_path_names_a_method_or_is_refused_in_grpc_gos_words() {
        let found = Method::find("/etcdserverpb.KV/Txn").unwrap();
        assert_eq!((found.service(), found.check_served().is_ok()), ("etcdserverpb.KV", true));
        assert!(Method::find("/etcdserverpb.Auth/AuthEnable").unwrap().check_served().is_err());
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
