//! What the kernel knows of this process, beyond what the `prometheus` crate reads.

use std::fs;

use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Gauge, IntCounter, IntGauge};

use super::raise;

/// File descriptors, address space and network traffic.
#[derive(Clone)]
pub(super) struct ProcessFiles {
    fd_used: IntGauge,
    fd_limit: IntGauge,
    virtual_max: Gauge,
    received: IntCounter,
    sent: IntCounter,
}

impl ProcessFiles {
    pub(super) fn new() -> ProcessFiles {
        let valid = "the name is a constant that Prometheus allows";
        ProcessFiles {
            fd_used: IntGauge::new("os_fd_used", "Open file descriptors.").expect(valid),
            fd_limit: IntGauge::new("os_fd_limit", "Most open file descriptors.").expect(valid),
            virtual_max: Gauge::new("process_virtual_memory_max_bytes", "Most virtual memory.").expect(valid),
            received: IntCounter::new(
                "process_network_receive_bytes_total",
                "Bytes received in the network namespace of the process.",
            )
            .expect(valid),
            sent: IntCounter::new(
                "process_network_transmit_bytes_total",
                "Bytes sent in the network namespace of the process.",
            )
            .expect(valid),
        }
    }

    fn read(&self) {
        use rustix::process::{Resource, getrlimit};
        if let Ok(entries) = fs::read_dir("/proc/self/fd") {
            self.fd_used.set(i64::try_from(entries.count()).unwrap_or(i64::MAX));
        }
        if let Some(limit) = getrlimit(Resource::Nofile).current {
            self.fd_limit.set(i64::try_from(limit).unwrap_or(i64::MAX));
        }
        #[expect(clippy::cast_precision_loss, reason = "the format has nothing but floats")]
        self.virtual_max.set(getrlimit(Resource::As).current.unwrap_or(u64::MAX) as f64);
        if let Some((received, sent)) =
            fs::read_to_string("/proc/self/net/netstat").ok().and_then(|text| octets(&text))
        {
            raise(&self.received, received);
            raise(&self.sent, sent);
        }
    }

    fn collectors(&self) -> [&dyn Collector; 5] {
        [&self.fd_used, &self.fd_limit, &self.virtual_max, &self.received, &self.sent]
    }
}

impl Collector for ProcessFiles {
    fn desc(&self) -> Vec<&Desc> {
        self.collectors().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        self.read();
        self.collectors().into_iter().flat_map(Collector::collect).collect()
    }
}

/// Finds the bytes received and sent in the text of `netstat`: a line of names, then one of numbers.
fn octets(netstat: &str) -> Option<(u64, u64)> {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("IpExt: "));
    let (names, numbers) = (lines.next()?, lines.next()?);
    let find = |name: &str| {
        let at = names.split(' ').position(|found| found == name)?;
        numbers.split(' ').nth(at)?.parse().ok()
    };
    Some((find("InOctets")?, find("OutOctets")?))
}

#[cfg(test)]
mod tests {
    use super::octets;

    #[test]
    fn octets_are_found_by_name() {
        let text = "TcpExt: A B\nTcpExt: 1 2\nIpExt: InNoRoutes InOctets OutOctets\nIpExt: 0 77 88\n";
        assert_eq!(octets(text), Some((77, 88)));
        assert_eq!(octets("IpExt: InOctets\n"), None);
    }
}
