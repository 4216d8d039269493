//! Parts of variables' values: each function appends a text, number, time or address. Functions for values that may be
//! missing return whether there is one.

use std::cell::Cell;
use std::fmt::Display;
use std::io::Write;
use std::net::IpAddr;
use std::thread::LocalKey;
use std::time::Duration;

use gale_log::local_time;
use gale_runtime::SocketAddress;

/// Appends a text.
pub fn append(out: &mut Vec<u8>, text: &[u8]) -> bool {
    out.extend_from_slice(text);
    true
}

/// Appends the texts, with the separator between them. Returns `false` if there are none.
pub fn append_joined<'v>(out: &mut Vec<u8>, values: impl Iterator<Item = &'v [u8]>, separator: &[u8]) -> bool {
    let mut is_there = false;
    for value in values {
        if std::mem::replace(&mut is_there, true) {
            out.extend_from_slice(separator);
        }
        out.extend_from_slice(value);
    }
    is_there
}

/// Appends a value's `Display` text.
pub fn append_text(out: &mut Vec<u8>, text: impl Display) -> bool {
    write!(out, "{text}").is_ok()
}

/// Appends a number without leading zeros.
pub fn append_number(out: &mut Vec<u8>, number: u64) -> bool {
    append_padded(out, number, 1);
    true
}

/// Appends a number with leading zeros up to this width.
pub fn append_padded(out: &mut Vec<u8>, number: u64, width_min: usize) {
    const DIGITS_MAX: usize = 20;
    let mut digits = [b'0'; DIGITS_MAX];
    let mut start = DIGITS_MAX;
    let mut rest = number;
    while rest > 0 {
        start -= 1;
        digits[start] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    out.extend_from_slice(&digits[start.min(DIGITS_MAX - width_min)..]);
}

/// Appends a time as `12.345`.
pub fn append_seconds(out: &mut Vec<u8>, time: Duration) -> bool {
    append_padded(out, time.as_secs(), 1);
    out.push(b'.');
    append_padded(out, time.subsec_millis().into(), 3);
    true
}

/// Appends a value, or a dash if there is none.
pub fn append_or_dash<T>(out: &mut Vec<u8>, value: Option<T>, append: impl Fn(&mut Vec<u8>, T) -> bool) {
    match value {
        Some(value) => {
            append(out, value);
        }
        None => out.push(b'-'),
    }
}

/// Appends a time as `12.345`, or a dash if there is none.
pub fn append_seconds_or_dash(out: &mut Vec<u8>, time: Option<Duration>) {
    append_or_dash(out, time, append_seconds);
}

/// Appends bytes as lower-case hexadecimal digits.
pub fn append_hex(out: &mut Vec<u8>, bytes: &[u8]) -> bool {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    // In chunks with a local buffer, so that the vector's capacity is checked once per chunk.
    for bytes in bytes.chunks(16) {
        let mut digits = [0; 32];
        for (pair, byte) in digits.chunks_exact_mut(2).zip(bytes) {
            pair.copy_from_slice(&[HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]]);
        }
        out.extend_from_slice(&digits[..2 * bytes.len()]);
    }
    true
}

/// Appends a port. Without a port the value exists and is empty.
pub fn append_port(out: &mut Vec<u8>, port: Option<u16>) -> bool {
    port.is_none_or(|port| append_number(out, port.into()))
}

/// Returns the port, if nginx would show one.
pub fn port(address: &SocketAddress) -> Option<u16> {
    address.inet().map(|address| address.port()).filter(|&port| port != 0)
}

/// Appends the address without its port.
pub fn append_address(out: &mut Vec<u8>, address: &SocketAddress) -> bool {
    match address {
        SocketAddress::Inet(address) => append_ip(out, address.ip()),
        SocketAddress::Unix(_) => append_text(out, address),
    }
}

/// Appends an address as text. IPv4 addresses are in most requests and logs, and the standard formatting takes more
/// instructions.
fn append_ip(out: &mut Vec<u8>, ip: IpAddr) -> bool {
    let IpAddr::V4(ip) = ip else { return append_text(out, ip) };
    for (number, octet) in ip.octets().into_iter().enumerate() {
        if number > 0 {
            out.push(b'.');
        }
        append_number(out, octet.into());
    }
    true
}

/// Appends the address in binary form.
pub fn append_binary_address(out: &mut Vec<u8>, address: &SocketAddress) -> bool {
    match address.inet().map(|address| address.ip()) {
        Some(IpAddr::V4(ip)) => append(out, &ip.octets()),
        Some(IpAddr::V6(ip)) => append(out, &ip.octets()),
        None => append(out, b"unix:"),
    }
}

/// Appends a time as `02/Nov/2026:03:04:05 -0330`.
pub fn append_time_local(out: &mut Vec<u8>, seconds: u64) -> bool {
    thread_local!(static LAST: LastText<26> = const { Cell::new((u64::MAX, [0; 26])) });
    append_of_second(out, seconds, &LAST, local_time(seconds).common_log())
}

/// Appends a time as `2026-11-02T03:04:05-03:30`.
pub fn append_time_iso8601(out: &mut Vec<u8>, seconds: u64) -> bool {
    thread_local!(static LAST: LastText<25> = const { Cell::new((u64::MAX, [0; 25])) });
    append_of_second(out, seconds, &LAST, local_time(seconds).iso8601())
}

/// A second and its text.
type LastText<const LENGTH: usize> = Cell<(u64, [u8; LENGTH])>;

/// Appends a text that is the same for a whole second. Most access logs have it in every line, and a copy is cheaper
/// than formatting it again.
fn append_of_second<const LENGTH: usize>(
    out: &mut Vec<u8>,
    seconds: u64,
    last: &'static LocalKey<LastText<LENGTH>>,
    text: impl Display,
) -> bool {
    let (second, kept) = last.get();
    if second == seconds {
        return append(out, &kept);
    }
    let start = out.len();
    append_text(out, text);
    // The text of a year with five digits is longer and not kept.
    if let Ok(text) = <[u8; LENGTH]>::try_from(&out[start..]) {
        last.set((seconds, text));
    }
    true
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns the value that `append` adds, or `None` if it returns `false`.
    pub(crate) fn text(append: impl FnOnce(&mut Vec<u8>) -> bool) -> Option<String> {
        let mut out = b">".to_vec();
        let is_there = append(&mut out);
        let text = String::from_utf8(out.split_off(1)).unwrap();
        assert!(is_there || text.is_empty(), "a missing value adds nothing");
        is_there.then_some(text)
    }

    #[test]
    fn numbers_and_times_have_nginx_s_form() {
        assert_eq!(text(|out| append_number(out, 0)).unwrap(), "0");
        assert_eq!(text(|out| append_number(out, u64::MAX)).unwrap(), u64::MAX.to_string());
        assert_eq!(
            text(|out| {
                append_padded(out, 9, 3);
                true
            })
            .unwrap(),
            "009"
        );
        assert_eq!(text(|out| append_seconds(out, Duration::from_micros(12_034_999))).unwrap(), "12.034");
        assert_eq!(text(|out| append_seconds(out, Duration::ZERO)).unwrap(), "0.000");
        assert_eq!(text(|out| append_hex(out, &[0, 0xab, 0xff])).unwrap(), "00abff");
        assert_eq!(text(|out| append_hex(out, &[0x1e; 33])).unwrap(), "1e".repeat(33));
        assert_eq!(text(|out| append_hex(out, &[])).unwrap(), "");
    }

    #[test]
    fn ports_and_addresses() {
        let inet = SocketAddress::Inet("192.0.2.1:8080".parse().unwrap());
        let inet6 = SocketAddress::Inet("[2001:db8::1]:80".parse().unwrap());
        let unix = SocketAddress::unix("/run/gale.sock");
        assert_eq!(text(|out| append_address(out, &inet)).unwrap(), "192.0.2.1");
        assert_eq!(text(|out| append_address(out, &inet6)).unwrap(), "2001:db8::1");
        assert_eq!(text(|out| append_address(out, &unix)).unwrap(), "unix:/run/gale.sock");
        assert_eq!(text(|out| append_port(out, port(&inet))).unwrap(), "8080");
        assert_eq!(text(|out| append_port(out, port(&unix))).unwrap(), "");
        let mut out = Vec::new();
        assert!(append_binary_address(&mut out, &inet));
        assert_eq!(out, [192, 0, 2, 1]);
    }

    #[test]
    fn the_time_is_kept_for_its_second_only() {
        for seconds in [1_000_000_000, 1_000_000_000, 1_000_000_001] {
            let time = local_time(seconds);
            let local = text(|out| append_time_local(out, seconds)).unwrap();
            let iso8601 = text(|out| append_time_iso8601(out, seconds)).unwrap();
            assert_eq!(local, time.common_log().to_string());
            assert_eq!(iso8601, time.iso8601().to_string());
        }
    }
}
