//! Protection against DNS rebinding: a server on a loopback address accepts requests for known host
//! names only. A web page whose host name resolves to that address passes the browser's same-origin
//! check, but sends its own name in the header `host`.

use std::net::{IpAddr, SocketAddr};

use hyper::HeaderMap;
use hyper::header::HOST;

/// The allowed names, besides those of loopback addresses; `None` allows every name.
pub(crate) struct Hosts(Option<Vec<String>>);

impl Hosts {
    pub fn new(address: SocketAddr, allowed: Vec<String>) -> Self {
        Self(is_loopback(address.ip()).then_some(allowed))
    }

    /// Whether the header `host`, if there is one, is an allowed name, with any port.
    pub fn admit(&self, headers: &HeaderMap) -> bool {
        let (Some(allowed), Some(host)) = (&self.0, headers.get(HOST)) else { return true };
        let Ok(host) = host.to_str() else { return false };
        let name = match host.rsplit_once(':') {
            Some((name, port)) if port.bytes().all(|b| b.is_ascii_digit()) => name,
            _ => host,
        };
        let ip = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name).parse::<IpAddr>();
        name.eq_ignore_ascii_case("localhost")
            || ip.is_ok_and(is_loopback)
            || allowed.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
    }
}

/// Whether it is a loopback address, of IPv4 also as one of IPv6 (`::ffff:127.0.0.1`).
fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_a_loopback_server() {
        let hosts = Hosts::new(SocketAddr::from(([127, 0, 0, 1], 8080)), vec!["box.lan".into()]);
        let admits = |hosts: &Hosts, host: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(HOST, host.parse().expect("a value"));
            hosts.admit(&headers)
        };
        for host in ["localhost", "LocalHost:8080", "127.0.0.1:1", "127.1.2.3", "[::1]:8080", "[::1]", "Box.lan:80"] {
            assert!(admits(&hosts, host), "{host}");
        }
        let mapped = Hosts::new(SocketAddr::from(([0, 0, 0, 0, 0, 0xffff, 0x7f00, 1], 80)), Vec::new());
        assert!(admits(&mapped, "[::ffff:127.0.0.1]:80") && !admits(&mapped, "evil.example"));
        for host in ["evil.example:8080", "localhost.evil.example", "192.168.0.1", "", "::1", "127.0.0.1.evil:80"] {
            assert!(!admits(&hosts, host), "{host}");
        }
        assert!(hosts.admit(&HeaderMap::new()), "HTTP/1.0 has no such header");
        assert!(admits(&Hosts::new(SocketAddr::from(([0, 0, 0, 0], 80)), Vec::new()), "any.example"));
    }
}
