//! The ClientHello message of TLS: parameters that a client sends in the clear at the beginning of a handshake.
//! (RFC 8446, section 4.1.2; RFC 5246, section 7.4.1.2; server names: RFC 6066, section 3)
//!
//! ```text
//! records:  22 | version | length | piece      of at most 16 KiB, again and again
//! message:  1 | length (3) | version (2) | random (32) | session (1+) | suites (2+) | compression (1+)
//!             | extensions (2+)
//! ```
//!
//! Reads only the parts requested by the caller; the TLS library parses the message again and refuses invalid ones.
//! Invariant: whatever the bytes, parsing reads no further than [`LENGTH_MAX`].

use std::borrow::Cow;

/// Maximum number of bytes examined: several times the size of messages with two post-quantum key shares.
pub const LENGTH_MAX: usize = 32 * 1024;

const HANDSHAKE: u8 = 22;
const CLIENT_HELLO: u8 = 1;
const RECORD_HEADER: usize = 5;
const MESSAGE_HEADER: usize = 4;
const RECORD_MAX: usize = 16 * 1024;

/// The extension `server_name`.
pub const SERVER_NAME: u16 = 0;
/// The extension `application_layer_protocol_negotiation` (RFC 7301).
pub const ALPN: u16 = 16;

/// The oldest version whose clients may list further versions in an extension (RFC 8446, section 4.2.1); otherwise it
/// is their newest.
const TLS12: u16 = 0x0303;

/// TLSv1.3, currently the newest version (RFC 8446, section 4.1.2).
const NEWEST: u16 = 0x0304;

const GROUPS: u16 = 10;
const SIGNATURE_SCHEMES: u16 = 13;
const VERSIONS: u16 = 43;

/// Returns `true` if a connection that begins with this byte uses TLS, or SSL version 2, which TLS refuses. HTTP begins
/// with neither.
pub fn is_tls(first: u8) -> bool {
    first == HANDSHAKE || first & 0x80 != 0
}

/// Returns a server name in the form used for comparison: lower case, without trailing dot.
pub fn host_of(name: &[u8]) -> Vec<u8> {
    name.strip_suffix(b".").unwrap_or(name).to_ascii_lowercase()
}

/// Result of parsing the beginning of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Status<'i> {
    /// The message is incomplete.
    NeedMore,
    /// A complete message.
    Complete(ClientHello<'i>),
    /// Not a ClientHello, or a malformed one.
    Malformed,
}

/// A ClientHello message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientHello<'i> {
    /// The version in the message header, which has little meaning since version 1.3.
    legacy_version: u16,
    /// The message after the session id.
    rest: Cow<'i, [u8]>,
}

/// Parses a ClientHello message at the beginning of the input.
pub fn parse(input: &[u8]) -> Status<'_> {
    match message(input) {
        Found::Whole(message) => {
            let legacy_version = message.first_chunk::<2>().map_or(0, |version| u16::from_be_bytes(*version));
            let rest = match &message {
                Cow::Borrowed(message) => after_session(message).map(Cow::Borrowed),
                Cow::Owned(message) => after_session(message).map(|rest| Cow::Owned(rest.to_vec())),
            };
            rest.map_or(Status::Malformed, |rest| Status::Complete(ClientHello { legacy_version, rest }))
        }
        Found::Part if input.len() >= LENGTH_MAX => Status::Malformed,
        Found::Part => Status::NeedMore,
        Found::Other => Status::Malformed,
    }
}

enum Found<'i> {
    /// The message without its header.
    Whole(Cow<'i, [u8]>),
    Part,
    Other,
}

/// Returns the message, assembled if it spans several records.
fn message(input: &[u8]) -> Found<'_> {
    let mut gathered: Cow<'_, [u8]> = Cow::Borrowed(&[]);
    let mut rest = &input[..input.len().min(LENGTH_MAX)];
    loop {
        match rest.first() {
            None => return Found::Part,
            Some(&kind) if kind != HANDSHAKE => return Found::Other,
            Some(_) => {}
        }
        let Some((header, behind)) = rest.split_at_checked(RECORD_HEADER) else { return Found::Part };
        let length = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if header[1] != 3 || length == 0 || length > RECORD_MAX {
            return Found::Other;
        }
        let piece = &behind[..length.min(behind.len())];
        if gathered.is_empty() {
            gathered = Cow::Borrowed(piece);
        } else {
            gathered.to_mut().extend_from_slice(piece);
        }
        if gathered.first().is_some_and(|&kind| kind != CLIENT_HELLO) {
            return Found::Other;
        }
        if let Some(&[_, high, middle, low]) = gathered.get(..MESSAGE_HEADER) {
            let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
            if length > LENGTH_MAX {
                return Found::Other;
            }
            let end = MESSAGE_HEADER + length;
            if gathered.len() >= end {
                return Found::Whole(match gathered {
                    Cow::Borrowed(gathered) => Cow::Borrowed(&gathered[MESSAGE_HEADER..end]),
                    Cow::Owned(gathered) => Cow::Owned(gathered[MESSAGE_HEADER..end].to_vec()),
                });
            }
        }
        let Some(next) = behind.get(length..) else { return Found::Part };
        rest = next;
    }
}

/// Skips version, random number and session id.
fn after_session(message: &[u8]) -> Option<&[u8]> {
    let (_, rest) = message.split_at_checked(2 + 32)?;
    let (_, rest) = take::<1>(rest)?;
    // Checks that suites, compression methods and extensions are complete according to their lengths.
    let (_, behind_suites) = take::<2>(rest)?;
    let (_, behind_compression) = take::<1>(behind_suites)?;
    if !behind_compression.is_empty() {
        take::<2>(behind_compression)?;
    }
    Some(rest)
}

/// Returns the data after a length field of `N` bytes, and the rest of the input.
fn take<const N: usize>(input: &[u8]) -> Option<(&[u8], &[u8])> {
    let (length, rest) = input.split_at_checked(N)?;
    let length = length.iter().fold(0, |length, &byte| length << 8 | usize::from(byte));
    rest.split_at_checked(length)
}

impl ClientHello<'_> {
    /// The requested server name, unchanged.
    pub fn server_name(&self) -> Option<&[u8]> {
        let (list, _) = take::<2>(self.extension(SERVER_NAME)?)?;
        let (kind, rest) = list.split_first()?;
        let (name, _) = take::<2>(rest)?;
        (*kind == 0 && !name.is_empty()).then_some(name)
    }

    /// The newest version supported by the client: 0x0303 is TLSv1.2. (RFC 8446, section 4.2.1)
    pub fn version(&self) -> u16 {
        self.versions().filter(|&version| version <= NEWEST).max().unwrap_or(self.legacy_version)
    }

    /// The version in the message header, if the client supports no version newer than TLSv1.1.
    pub fn version_before_tls12(&self) -> Option<u16> {
        (self.legacy_version < TLS12 && self.extension(VERSIONS).is_none()).then_some(self.legacy_version)
    }

    /// The cipher suites of the client, in its order.
    pub fn cipher_suites(&self) -> impl Iterator<Item = u16> {
        numbers(take::<2>(&self.rest).map_or(&[], |(suites, _)| suites))
    }

    /// The key exchange groups of the client, in its order.
    pub fn groups(&self) -> impl Iterator<Item = u16> {
        numbers(self.extension(GROUPS).and_then(take::<2>).map_or(&[], |(groups, _)| groups))
    }

    /// The signature schemes of the client, in its order.
    pub fn signature_schemes(&self) -> impl Iterator<Item = u16> {
        numbers(self.extension(SIGNATURE_SCHEMES).and_then(take::<2>).map_or(&[], |(schemes, _)| schemes))
    }

    /// The versions supported by the client, in its order.
    pub fn versions(&self) -> impl Iterator<Item = u16> {
        let listed = self.extension(VERSIONS).and_then(take::<1>).map(|(versions, _)| numbers(versions));
        let legacy = listed.is_none().then_some(self.legacy_version);
        listed.into_iter().flatten().chain(legacy)
    }

    /// The application protocols offered by the client, in its order. (RFC 7301, section 3.1)
    pub fn alpn_protocols(&self) -> impl Iterator<Item = &[u8]> {
        let mut rest = self.extension(ALPN).and_then(take::<2>).map_or(&[][..], |(names, _)| names);
        std::iter::from_fn(move || {
            let (name, behind) = take::<1>(rest)?;
            rest = behind;
            (!name.is_empty()).then_some(name)
        })
    }

    /// The types of the extensions, in the order of the message.
    pub fn extension_types(&self) -> impl Iterator<Item = u16> {
        self.extensions().map(|(kind, _)| kind)
    }

    /// Returns a copy that owns its data.
    pub fn into_owned(self) -> ClientHello<'static> {
        ClientHello { legacy_version: self.legacy_version, rest: Cow::Owned(self.rest.into_owned()) }
    }

    fn extension(&self, wanted: u16) -> Option<&[u8]> {
        self.extensions().find_map(|(kind, content)| (kind == wanted).then_some(content))
    }

    fn extensions(&self) -> impl Iterator<Item = (u16, &[u8])> {
        let behind_suites = take::<2>(&self.rest).map_or(&[][..], |(_, rest)| rest);
        let behind_compression = take::<1>(behind_suites).map_or(&[][..], |(_, rest)| rest);
        let mut rest = take::<2>(behind_compression).map_or(&[][..], |(extensions, _)| extensions);
        std::iter::from_fn(move || {
            let (kind, behind) = rest.split_first_chunk()?;
            let (content, behind) = take::<2>(behind)?;
            rest = behind;
            Some((u16::from_be_bytes(*kind), content))
        })
    }
}

fn numbers(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks_exact(2).map(|pair| u16::from_be_bytes([pair[0], pair[1]]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sized<const N: usize>(content: &[u8]) -> Vec<u8> {
        [&(content.len() as u32).to_be_bytes()[4 - N..], content].concat()
    }

    fn extension(kind: u16, content: &[u8]) -> Vec<u8> {
        [&kind.to_be_bytes()[..], &sized::<2>(content)].concat()
    }

    fn hello(name: &str) -> Vec<u8> {
        hello_with(name, &[])
    }

    fn hello_with(name: &str, more: &[u8]) -> Vec<u8> {
        let name = [&[0][..], &sized::<2>(name.as_bytes())].concat();
        let extensions = [
            more.to_vec(),
            extension(21, &[0; 30]),
            extension(10, &sized::<2>(&[0, 29, 0, 23])),
            extension(0, &sized::<2>(&name)),
        ]
        .concat();
        let message = [
            &[3, 3][..],
            &[7; 32],
            &sized::<1>(&[9; 32]),
            &sized::<2>(&[0x13, 1, 0x13, 2]),
            &[1, 0],
            &sized::<2>(&extensions),
        ];
        [&[1][..], &sized::<3>(&message.concat())].concat()
    }

    fn records(message: &[u8], piece: usize) -> Vec<u8> {
        message.chunks(piece).flat_map(|piece| [&[22, 3, 1][..], &sized::<2>(piece)].concat()).collect()
    }

    #[test]
    fn fields_are_found_however_the_message_is_cut() {
        for piece in [1, 2, 3, 50, 10_000] {
            let mut input = records(&hello("Example.com"), piece);
            for length in 0..input.len() {
                assert_eq!(parse(&input[..length]), Status::NeedMore, "{length} in pieces of {piece}");
            }
            input.extend_from_slice(b"what follows");
            let Status::Complete(hello) = parse(&input) else { panic!("pieces of {piece}") };
            assert_eq!(hello.server_name(), Some(&b"Example.com"[..]));
            assert_eq!(hello.cipher_suites().collect::<Vec<_>>(), [0x1301, 0x1302]);
            assert_eq!(hello.groups().collect::<Vec<_>>(), [29, 23]);
        }
        let alpn = [sized::<1>(b"h2"), sized::<1>(b"http/1.1")].concat();
        let more = [extension(16, &sized::<2>(&alpn)), extension(13, &sized::<2>(&[4, 3])), extension(0x0a0a, &[])];
        let mut whole = hello_with("a", &more.concat());
        let input = records(&whole, 100);
        let Status::Complete(hello) = parse(&input) else { panic!("it is whole") };
        assert_eq!(hello.alpn_protocols().collect::<Vec<_>>(), [&b"h2"[..], b"http/1.1"]);
        assert_eq!(hello.signature_schemes().collect::<Vec<_>>(), [0x403]);
        assert_eq!(hello.extension_types().collect::<Vec<_>>(), [16, 13, 0x0a0a, 21, 10, 0]);
        assert_eq!(hello.versions().collect::<Vec<_>>(), [0x303]);
        assert_eq!(hello.version_before_tls12(), None);
        // The version follows the record header and the message header.
        whole[5] = 1;
        let input = records(&whole, 100);
        let Status::Complete(hello) = parse(&input) else { panic!("it is whole") };
        assert_eq!(hello.version_before_tls12(), Some(0x301));
        whole = hello_with("a", &extension(43, &sized::<1>(&[3, 4, 3, 3])));
        let input = records(&whole, 100);
        let Status::Complete(hello) = parse(&input) else { panic!("it is whole") };
        assert_eq!(hello.version_before_tls12(), None);
        assert_eq!(hello.into_owned().versions().collect::<Vec<_>>(), [0x304, 0x303]);
        let nameless = records(&hello_with("", &[]), 1000);
        let Status::Complete(hello) = parse(&nameless) else { panic!("it is whole") };
        assert_eq!(hello.server_name(), None);
    }

    #[test]
    fn malformed_client_hello_is_refused_at_once() {
        for input in [&b"GET / HTTP/1.1"[..], b"\x16\x02\x00\x00\x01", b"\x16\x03\x01\x00\x00", b"\x16\x03\x01\xff\xff"]
        {
            assert_eq!(parse(input), Status::Malformed, "{input:?}");
        }
        assert_eq!(parse(&records(&[2, 0, 0, 1], 10)), Status::Malformed);
        // A message longer than any that a client sends.
        assert_eq!(parse(&records(&[1, 9, 0, 0], 10)), Status::Malformed);
        // A message that does not end.
        let endless = records(&[&[1, 0, 0x7f, 0xff][..], &[0; 40_000]].concat(), 1);
        assert_eq!(parse(&endless), Status::Malformed);
    }

    #[test]
    fn lengths_that_lie_and_random_changes_panic_nowhere() {
        let good = records(&hello("example.com"), 60);
        for index in 0..good.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bad = good.clone();
                bad[index] = value;
                if let Status::Complete(hello) = parse(&bad) {
                    let _ = (hello.server_name().is_some(), hello.cipher_suites().count(), hello.groups().count());
                    let _ =
                        (hello.versions().count(), hello.alpn_protocols().count(), hello.signature_schemes().count());
                }
            }
        }
    }
}
