//! Ports for members, each given out once on the whole machine for as long as this process runs.
//!
//! Not by binding port 0: a port from there is one of those that the kernel gives to every connection that goes out, so a
//! member that is down for a moment may find its port taken, even by a peer that tries to reach it there.

use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::ops::Range;
use std::sync::Mutex;

/// Ports that need no privilege and that well-known services do not have.
const FIRST: u16 = 10_000;
/// Where the kernel's own begin, unless it says otherwise.
const KERNELS_OWN: u16 = 32_768;
/// Random ports that are tried; almost all are free.
const TRIES_MAX: usize = 10_000;

/// A UDP socket with the same number holds each port: nobody here uses UDP, and the kernel frees it with the process.
static TAKEN: Mutex<Vec<UdpSocket>> = Mutex::new(Vec::new());

/// A port on which nobody listens, and which no other test gets.
pub(crate) fn free_port() -> u16 {
    let range = range();
    for _ in 0..TRIES_MAX {
        let address = (Ipv4Addr::LOCALHOST, fastrand::u16(range.clone()));
        let Ok(taken) = UdpSocket::bind(address) else { continue };
        if TcpListener::bind(address).is_ok() {
            TAKEN.lock().unwrap().push(taken);
            return address.1;
        }
    }
    panic!("none of {range:?} is free");
}

/// All that the kernel does not give to connections.
fn range() -> Range<u16> {
    let text = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap_or_default();
    let kernels = text.split_whitespace().next().and_then(|first| first.parse().ok()).unwrap_or(KERNELS_OWN);
    assert!(kernels > FIRST, "the kernel gives all ports from {kernels} on to connections");
    FIRST..kernels
}

#[test]
fn ports_are_given_out_once_and_not_by_the_kernel() {
    let ports: Vec<u16> = (0..100).map(|_| free_port()).collect();
    let mut distinct = ports.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), ports.len());
    for port in ports {
        assert!(range().contains(&port));
        assert!(UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).is_err(), "another process could get it too");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port));
        assert!(listener.is_ok(), "a member can listen on it");
    }
}
