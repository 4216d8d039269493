//! The PROXY protocol, versions 1 and 2: a header in which a proxy passes the client's address at the beginning of a
//! connection. (<https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt>)
//!
//! ```text
//! 1:  PROXY TCP4 192.0.2.1 192.0.2.2 56324 443 CR LF        at most 107 bytes
//! 2:  CR LF CR LF NUL CR LF QUIT LF | version, command | family, transport | length | addresses | TLVs
//! ```
//!
//! Stricter than nginx: addresses must belong to the address family in the header, and unknown commands are refused.
//! Invariant: whatever the bytes, parsing reads no further than [`LENGTH_MAX`].

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// Maximum length of a header, as in nginx.
pub const LENGTH_MAX: usize = 4096;

/// Maximum length of a version 1 line with its line end, as specified.
const LINE_MAX: usize = 107;

const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";

/// Length of signature, version and command, family and transport, length field.
const FIXED_LENGTH: usize = 16;

/// Information about a connection from the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyHeader {
    /// Address of the client.
    pub source: SocketAddr,
    /// Address of the proxy that the client connected to.
    pub destination: SocketAddr,
    /// Further TLVs of version 2: type, length, value, repeated.
    tlvs: Box<[u8]>,
}

/// Result of parsing the beginning of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status {
    /// The header is incomplete.
    NeedMore,
    /// A complete header.
    Complete {
        /// Length of the header in bytes.
        consumed: usize,
        /// Content of the header; `None` if the connection is the proxy's own, or its type has no addresses.
        header: Option<Box<ProxyHeader>>,
    },
}

/// Error in a header. The messages are nginx's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProxyOffence {
    /// Not a header; contains the beginning of the input.
    Broken(Box<[u8]>),
    /// A version other than 1 and 2.
    UnknownVersion(u8),
    /// Longer than [`LENGTH_MAX`].
    TooLarge,
}

impl fmt::Display for ProxyOffence {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProxyOffence::Broken(line) => write!(formatter, "broken header: \"{}\"", String::from_utf8_lossy(line)),
            ProxyOffence::UnknownVersion(version) => write!(formatter, "unknown PROXY protocol version: {version}"),
            ProxyOffence::TooLarge => formatter.write_str("header is too large"),
        }
    }
}

/// Parses a header at the beginning of `input`.
pub fn parse(input: &[u8]) -> Result<Status, ProxyOffence> {
    let common = input.len().min(SIGNATURE.len());
    if input[..common] == SIGNATURE[..common] {
        return if input.len() < FIXED_LENGTH { Ok(Status::NeedMore) } else { parse_version_2(input) };
    }
    parse_version_1(input)
}

fn parse_version_1(input: &[u8]) -> Result<Status, ProxyOffence> {
    const PREFIX: &[u8] = b"PROXY ";
    let begun = &input[..input.len().min(LINE_MAX)];
    let common = begun.len().min(PREFIX.len());
    let line_end = memchr::memchr(b'\n', begun);
    if begun[..common] != PREFIX[..common] {
        return Err(broken(begun));
    }
    let Some(line_end) = line_end else {
        let family = begun.get(PREFIX.len()..).unwrap_or_default();
        let may_be = |known: &[u8]| family.iter().zip(known).all(|(byte, known)| byte == known);
        let may_come = [&b"TCP4 "[..], b"TCP6 ", b"UNKNOWN"].into_iter().any(may_be);
        return if begun.len() < LINE_MAX && may_come { Ok(Status::NeedMore) } else { Err(broken(begun)) };
    };
    let line = begun[..line_end].strip_suffix(b"\r").and_then(|line| line.strip_prefix(PREFIX));
    let words = line.ok_or_else(|| broken(begun))?;
    let consumed = line_end + 1;
    if words.starts_with(b"UNKNOWN") {
        return Ok(Status::Complete { consumed, header: None });
    }
    let header = addresses_of_line(words).ok_or_else(|| broken(begun))?;
    Ok(Status::Complete { consumed, header: Some(Box::new(header)) })
}

/// Parses `TCP4 192.0.2.1 192.0.2.2 56324 443`.
fn addresses_of_line(words: &[u8]) -> Option<ProxyHeader> {
    let mut words = std::str::from_utf8(words).ok()?.split(' ');
    let family = words.next()?;
    let mut address = || {
        let text = words.next()?;
        match family {
            "TCP4" => text.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
            "TCP6" => text.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
            _ => None,
        }
    };
    let (source, destination) = (address()?, address()?);
    let mut port = || {
        let text = words.next()?;
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse::<u16>().ok())?
    };
    let (source_port, destination_port) = (port()?, port()?);
    words.next().is_none().then(|| ProxyHeader {
        source: SocketAddr::new(source, source_port),
        destination: SocketAddr::new(destination, destination_port),
        tlvs: Box::default(),
    })
}

/// Parses input that begins with the signature and contains the complete fixed part.
fn parse_version_2(input: &[u8]) -> Result<Status, ProxyOffence> {
    let (version, command) = (input[12] >> 4, input[12] & 0xf);
    let (family, transport) = (input[13] >> 4, input[13] & 0xf);
    if version != 2 {
        return Err(ProxyOffence::UnknownVersion(version));
    }
    let consumed = FIXED_LENGTH + usize::from(u16::from_be_bytes([input[14], input[15]]));
    if consumed > LENGTH_MAX {
        return Err(ProxyOffence::TooLarge);
    }
    let Some(rest) = input.get(FIXED_LENGTH..consumed) else { return Ok(Status::NeedMore) };
    let header = match (command, family, transport) {
        // LOCAL: the proxy's own connection, for example a health check.
        (0, ..) => None,
        (1, 1, 1) => Some(addresses::<4>(rest).ok_or_else(|| broken(input))?),
        (1, 2, 1) => Some(addresses::<16>(rest).ok_or_else(|| broken(input))?),
        // Datagrams, Unix sockets and unassigned types: as in nginx, without addresses.
        (1, ..) => None,
        _ => return Err(broken(input)),
    };
    Ok(Status::Complete { consumed, header: header.map(Box::new) })
}

/// Parses both addresses of `N` bytes, both ports, and the TLVs after them.
fn addresses<const N: usize>(rest: &[u8]) -> Option<ProxyHeader>
where
    IpAddr: From<[u8; N]>,
{
    let (source, rest) = rest.split_first_chunk::<N>()?;
    let (destination, rest) = rest.split_first_chunk::<N>()?;
    let (source_port, rest) = rest.split_first_chunk::<2>()?;
    let (destination_port, tlvs) = rest.split_first_chunk::<2>()?;
    Some(ProxyHeader {
        source: SocketAddr::new(IpAddr::from(*source), u16::from_be_bytes(*source_port)),
        destination: SocketAddr::new(IpAddr::from(*destination), u16::from_be_bytes(*destination_port)),
        tlvs: tlvs.into(),
    })
}

/// Returns the error for invalid input, with its first line for the log.
fn broken(input: &[u8]) -> ProxyOffence {
    let line = input.iter().take(LINE_MAX).take_while(|byte| !matches!(byte, b'\r' | b'\n'));
    ProxyOffence::Broken(line.copied().collect())
}

/// TLV types with names. (section 2.2 of the specification)
const TYPES: [(&[u8], u8); 5] =
    [(b"alpn", 0x01), (b"authority", 0x02), (b"unique_id", 0x05), (b"ssl", SSL), (b"netns", 0x30)];

/// TLV types with names within `ssl`.
const SSL_TYPES: [(&[u8], u8); 5] =
    [(b"version", 0x21), (b"cn", 0x22), (b"cipher", 0x23), (b"sig_alg", 0x24), (b"key_alg", 0x25)];

const SSL: u8 = 0x20;

impl ProxyHeader {
    /// Appends the value of the TLV with this name: `alpn`, `ssl_cn`, `ssl_verify`, `0xae`. Returns `false` if there is
    /// none.
    pub fn append_tlv(&self, name: &[u8], out: &mut Vec<u8>) -> bool {
        let found = match name.strip_prefix(b"ssl_") {
            None => type_of(name, &TYPES).and_then(|kind| find(&self.tlvs, kind)),
            Some(name) => {
                let ssl = find(&self.tlvs, SSL).and_then(|ssl| ssl.split_first_chunk::<5>());
                let Some(([_client, verify @ ..], tlvs)) = ssl else { return false };
                if name == b"verify" {
                    out.extend_from_slice(u32::from_be_bytes(*verify).to_string().as_bytes());
                    return true;
                }
                type_of(name, &SSL_TYPES).and_then(|kind| find(tlvs, kind))
            }
        };
        out.extend_from_slice(found.unwrap_or_default());
        found.is_some()
    }
}

/// TLS information about a client, sent in version 2.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TlsTold {
    /// Server name requested by the client.
    pub authority: Option<Vec<u8>>,
    /// Negotiated application protocol.
    pub alpn: Option<Vec<u8>>,
    /// Protocol version: `TLSv1.3`.
    pub version: &'static str,
    /// Name of the cipher suite.
    pub cipher: &'static str,
    /// Common name in the client's certificate.
    pub common_name: Option<String>,
    /// The client's certificate, if it presented one.
    pub certificate: Option<CertificateTold>,
}

/// Information about a client's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CertificateTold {
    /// Presented in this handshake, not in that of an earlier session.
    pub is_fresh: bool,
    /// Verified successfully.
    pub is_good: bool,
}

/// Transport of the client's connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Stream,
    /// UDP.
    Datagram,
}

/// Appends a header of version 1, with `UNKNOWN` if an address is missing. (section 2.1)
pub fn write_version_1(source: Option<SocketAddr>, destination: Option<SocketAddr>, out: &mut Vec<u8>) {
    let (Some(source), Some(destination)) = (source, destination) else {
        return out.extend_from_slice(b"PROXY UNKNOWN\r\n");
    };
    let is_ipv4 = source.is_ipv4() && destination.is_ipv4();
    let family = if is_ipv4 { "TCP4" } else { "TCP6" };
    // Both addresses must belong to the same family.
    let of_family = |ip: IpAddr| match ip {
        IpAddr::V4(ip) if !is_ipv4 => IpAddr::V6(ip.to_ipv6_mapped()),
        ip => ip,
    };
    let (from, to) = (of_family(source.ip()), of_family(destination.ip()));
    let line = format!("PROXY {family} {from} {to} {} {}\r\n", source.port(), destination.port());
    out.extend_from_slice(line.as_bytes());
}

/// Appends a header of version 2 with a checksum. If an address is missing, the command is LOCAL. (section 2.2)
pub fn write_version_2(
    source: Option<SocketAddr>,
    destination: Option<SocketAddr>,
    transport: Transport,
    tls: Option<&TlsTold>,
    out: &mut Vec<u8>,
) {
    let start = out.len();
    out.extend_from_slice(SIGNATURE);
    let transport = match transport {
        Transport::Stream => 1,
        Transport::Datagram => 2,
    };
    match (source, destination) {
        (Some(SocketAddr::V4(source)), Some(SocketAddr::V4(destination))) => {
            out.extend_from_slice(&[0x21, 0x10 | transport, 0, 0]);
            out.extend_from_slice(&source.ip().octets());
            out.extend_from_slice(&destination.ip().octets());
            out.extend_from_slice(&source.port().to_be_bytes());
            out.extend_from_slice(&destination.port().to_be_bytes());
        }
        (Some(source), Some(destination)) => {
            let octets = |ip: IpAddr| match ip {
                IpAddr::V4(ip) => ip.to_ipv6_mapped().octets(),
                IpAddr::V6(ip) => ip.octets(),
            };
            out.extend_from_slice(&[0x21, 0x20 | transport, 0, 0]);
            out.extend_from_slice(&octets(source.ip()));
            out.extend_from_slice(&octets(destination.ip()));
            out.extend_from_slice(&source.port().to_be_bytes());
            out.extend_from_slice(&destination.port().to_be_bytes());
        }
        _ => out.extend_from_slice(&[0x20, 0, 0, 0]),
    }
    if let Some(tls) = tls {
        tls.write(out);
    }
    write_tlv(CRC32C, &[0; 4], out);
    let length = u16::try_from(out.len() - start - FIXED_LENGTH).unwrap_or(u16::MAX);
    out[start + 14..start + 16].copy_from_slice(&length.to_be_bytes());
    let checksum = crc32c(&out[start..]).to_be_bytes();
    let end = out.len();
    out[end - 4..].copy_from_slice(&checksum);
}

const CRC32C: u8 = 0x03;

/// Maximum length of a text in the TLVs written.
const TEXT_MAX: usize = 255;

fn write_tlv(kind: u8, value: &[u8], out: &mut Vec<u8>) {
    out.push(kind);
    out.extend_from_slice(&(value.len() as u16).to_be_bytes());
    out.extend_from_slice(value);
}

fn write_text(kind: u8, text: &[u8], out: &mut Vec<u8>) {
    write_tlv(kind, &text[..text.len().min(TEXT_MAX)], out);
}

impl TlsTold {
    fn write(&self, out: &mut Vec<u8>) {
        let texts = [(0x02, self.authority.as_deref()), (0x01, self.alpn.as_deref())];
        texts.into_iter().for_each(|(kind, text)| text.into_iter().for_each(|text| write_text(kind, text, out)));
        // The flags for TLS and for a certificate; in the verify field 0 means success.
        let shown = self.certificate.map_or(0, |told| if told.is_fresh { 0x6 } else { 0x4 });
        let verify = u32::from(!self.certificate.is_some_and(|told| told.is_good));
        let mut ssl = vec![0x1 | shown];
        ssl.extend_from_slice(&verify.to_be_bytes());
        write_text(0x21, self.version.as_bytes(), &mut ssl);
        self.common_name.iter().for_each(|name| write_text(0x22, name.as_bytes(), &mut ssl));
        write_text(0x23, self.cipher.as_bytes(), &mut ssl);
        write_tlv(SSL, &ssl, out);
    }
}

/// Computes CRC-32C (Castagnoli; RFC 3720, section 12.1), bit by bit, since headers are short.
fn crc32c(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), |crc, _| step(crc)))
}

fn type_of(name: &[u8], names: &[(&[u8], u8)]) -> Option<u8> {
    if let Some(digits) = name.strip_prefix(b"0x") {
        let digits = std::str::from_utf8(digits).ok()?;
        return u8::from_str_radix(digits, 16).ok();
    }
    names.iter().find(|(known, _)| *known == name).map(|(_, kind)| *kind)
}

/// Returns the first value of this type. The search ends at a truncated TLV.
fn find(mut tlvs: &[u8], wanted: u8) -> Option<&[u8]> {
    loop {
        let ([kind, length @ ..], rest) = tlvs.split_first_chunk::<3>()?;
        let (value, rest) = rest.split_at_checked(u16::from_be_bytes(*length).into())?;
        if *kind == wanted {
            return Some(value);
        }
        tlvs = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(input: &[u8]) -> ProxyHeader {
        match parse(input) {
            Ok(Status::Complete { consumed, header: Some(header) }) if consumed == input.len() => *header,
            other => panic!("{other:?}"),
        }
    }

    fn binary(command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let mut bytes = SIGNATURE.to_vec();
        bytes.extend([command, family]);
        bytes.extend((rest.len() as u16).to_be_bytes());
        bytes.extend(rest);
        bytes
    }

    const INET: [u8; 12] = [192, 0, 2, 1, 192, 0, 2, 2, 0x12, 0x34, 0, 80];

    #[test]
    fn a_line_tells_both_addresses() {
        let found = header(b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 5678\r\n");
        assert_eq!(found.source, "192.0.2.1:1234".parse().unwrap());
        assert_eq!(found.destination, "192.0.2.2:5678".parse().unwrap());
        let found = header(b"PROXY TCP6 2001:db8::1 ::ffff:192.0.2.2 1 65535\r\n");
        assert_eq!(found.source, "[2001:db8::1]:1".parse().unwrap());
    }

    #[test]
    fn written_header_is_read_back() {
        let [source, destination] = ["192.0.2.1:1234", "192.0.2.2:80"].map(|text| text.parse::<SocketAddr>().ok());
        let mut line = Vec::new();
        write_version_1(source, destination, &mut line);
        assert_eq!(line, b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 80\r\n");
        let mut binary = Vec::new();
        write_version_2(source, "[2001:db8::1]:80".parse().ok(), Transport::Stream, None, &mut binary);
        let read = header(&binary);
        assert_eq!(read.source, "[::ffff:192.0.2.1]:1234".parse().unwrap());
        let tls = TlsTold { version: "TLSv1.3", cipher: "X", alpn: Some(b"mqtt".to_vec()), ..TlsTold::default() };
        binary.clear();
        write_version_2(source, destination, Transport::Stream, Some(&tls), &mut binary);
        let read = header(&binary);
        assert_eq!((Some(read.source), Some(read.destination)), (source, destination));
        let tlv = |name: &str| {
            let mut value = Vec::new();
            read.append_tlv(name.as_bytes(), &mut value).then_some(value)
        };
        assert_eq!(tlv("alpn").as_deref(), Some(&b"mqtt"[..]));
        assert_eq!(tlv("ssl_version").as_deref(), Some(&b"TLSv1.3"[..]));
        assert_eq!(tlv("ssl_verify").as_deref(), Some(&b"1"[..]));
        // The checksum covers the header with zeros in its own place.
        let end = binary.len();
        let told = u32::from_be_bytes(binary[end - 4..].try_into().unwrap());
        binary[end - 4..].fill(0);
        assert_eq!(crc32c(&binary), told);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn without_addresses_nothing_is_told_of_the_client() {
        let (mut line, mut binary) = (Vec::new(), Vec::new());
        write_version_1(None, None, &mut line);
        assert_eq!(line, b"PROXY UNKNOWN\r\n");
        write_version_2(None, None, Transport::Datagram, None, &mut binary);
        assert_eq!(parse(&binary), Ok(Status::Complete { consumed: binary.len(), header: None }));
    }

    #[test]
    fn lines_without_addresses_tell_nothing() {
        for line in [&b"PROXY UNKNOWN\r\n"[..], b"PROXY UNKNOWN ffff:f::1 ffff::2 65535 65535\r\n"] {
            assert_eq!(parse(line), Ok(Status::Complete { consumed: line.len(), header: None }));
        }
    }

    #[test]
    fn malformed_headers_are_refused() {
        let broken = [
            &b"GET / HTTP/1.1\r\n"[..],
            b"PROXY TCP4 192.0.2.1 192.0.2.2 1234\r\n",
            b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 65536\r\n",
            b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 +1\r\n",
            b"PROXY TCP4 ::1 ::1 1234 5678\r\n",
            b"PROXY TCP5 192.0.2.1 192.0.2.2 1234 5678\r\n",
            b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 5678 9\r\n",
            b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 5678\n",
            &[b'P'; 20],
            &[b"PROXY ", &[b'x'; 200][..]].concat(),
            &binary(0x22, 0x11, &INET),
            &binary(0x21, 0x11, &INET[..11]),
        ];
        for input in broken {
            assert!(matches!(parse(input), Err(ProxyOffence::Broken(_))), "{:?}", String::from_utf8_lossy(input));
        }
        let text = parse(broken[0]).unwrap_err().to_string();
        assert_eq!(text, "broken header: \"GET / HTTP/1.1\"");
        assert_eq!(parse(&binary(0x31, 0x11, &INET)), Err(ProxyOffence::UnknownVersion(3)));
        assert_eq!(parse(&binary(0x21, 0x11, &[0; LENGTH_MAX])), Err(ProxyOffence::TooLarge));
    }

    #[test]
    fn a_header_may_come_byte_by_byte() {
        let ssl = binary(0x21, 0x21, &[0; 36]);
        for whole in [&b"PROXY TCP4 192.0.2.1 192.0.2.2 1234 5678\r\n"[..], &binary(0x21, 0x11, &INET), &ssl] {
            for length in 0..whole.len() {
                assert_eq!(parse(&whole[..length]), Ok(Status::NeedMore), "{length}");
            }
            let followed = [whole, b"GET / HTTP/1.1\r\n"].concat();
            assert!(matches!(parse(&followed), Ok(Status::Complete { consumed, .. }) if consumed == whole.len()));
        }
    }

    #[test]
    fn binary_headers_tell_addresses_unless_the_proxy_asks_for_itself() {
        let found = header(&binary(0x21, 0x11, &INET));
        assert_eq!((found.source, found.destination.port()), ("192.0.2.1:4660".parse().unwrap(), 80));
        for (command, family) in [(0x20, 0x11), (0x21, 0x12), (0x21, 0x31), (0x21, 0x00)] {
            let bytes = binary(command, family, &INET);
            assert_eq!(parse(&bytes), Ok(Status::Complete { consumed: bytes.len(), header: None }));
        }
    }

    #[test]
    fn values_are_found_by_name_and_number() {
        let tlv = |kind: u8, value: &[u8]| [&[kind, 0, value.len() as u8], value].concat();
        let ssl = [&[1, 0, 0, 0, 7][..], &tlv(0x21, b"TLSv1.2"), &tlv(0x22, b"example.com")].concat();
        let tlvs = [tlv(0x02, b"foo"), tlv(0x20, &ssl), tlv(0xae, b"12345"), vec![0x05, 0xff, 0xff, 1]].concat();
        let found = header(&binary(0x21, 0x11, &[&INET[..], &tlvs].concat()));
        let value = |name: &str| {
            let mut out = Vec::new();
            found.append_tlv(name.as_bytes(), &mut out).then(|| String::from_utf8(out).unwrap())
        };
        assert_eq!(value("authority").as_deref(), Some("foo"));
        assert_eq!(value("ssl_verify").as_deref(), Some("7"));
        assert_eq!(value("ssl_version").as_deref(), Some("TLSv1.2"));
        assert_eq!(value("ssl_cn").as_deref(), Some("example.com"));
        assert_eq!(value("ssl_0x22").as_deref(), Some("example.com"));
        assert_eq!(value("0xae").as_deref(), Some("12345"));
        for missing in ["alpn", "ssl_cipher", "unique_id", "nonsense", "0x", "0x100", "ssl_", "ssl_0xzz"] {
            assert_eq!(value(missing), None, "{missing}");
        }
    }

    #[test]
    fn version_1_writes_both_addresses_in_one_family() {
        let mut out = Vec::new();
        let source = "[2001:db8::1]:5".parse().ok();
        write_version_1(source, "192.0.2.1:6".parse().ok(), &mut out);
        assert_eq!(out, b"PROXY TCP6 2001:db8::1 ::ffff:192.0.2.1 5 6\r\n");
        assert!(matches!(parse(&out), Ok(Status::Complete { header: Some(_), .. })));
    }

    proptest::proptest! {
        #[test]
        fn no_input_panics_and_consumed_bytes_exist(mut input: Vec<u8>, is_binary: bool) {
            if is_binary {
                input.splice(..0, *SIGNATURE);
            }
            let mut prefixes = (0..=input.len()).map(|length| parse(&input[..length]));
            let first = prefixes.find(|found| *found != Ok(Status::NeedMore));
            if let Some(first) = first {
                assert_eq!(first.is_err(), parse(&input).is_err(), "in pieces as whole");
            }
            if let Ok(Status::Complete { consumed, header }) = parse(&input) {
                assert!(consumed <= input.len() && consumed <= LENGTH_MAX);
                if let Some(header) = header {
                    header.append_tlv(b"ssl_cn", &mut Vec::new());
                }
            }
        }
    }
}
