//! DNS messages: encodes a question and parses the answer to it. (RFC 1035 §4)
//!
//! Uses neither sockets nor clocks. A message that does not answer the question is an [`Offence`], in nginx's words; a
//! negative answer is an answer. The work is bounded whatever the bytes: the library limits compression pointers, the
//! constants limit aliases and records.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use domain::base::iana::{Class, Opcode, Rcode, Rtype};
use domain::base::name::ToName;
use domain::base::{Message, MessageBuilder, Name, NameBuilder, ParsedName, ParsedRecord};
use domain::rdata::{A, Aaaa, Cname, Ptr, Soa, Srv};

use super::ResolveError;

/// Most aliases in one answer; resolvers do not follow more either (BIND 11, Unbound 11).
const ALIASES_MAX: usize = 16;

/// Most addresses of one answer: twice what fits a datagram, and a bound on a name's size in the cache.
const RECORDS_MAX: usize = 64;

/// Longest time to live, in seconds: a week. (RFC 8767 §4)
pub(super) const TTL_MAX: u32 = 7 * 24 * 3600;

/// Size of a query: header, a name of 255 bytes, type and class.
const QUERY_BYTES_MAX: usize = 12 + 255 + 4;

/// A name in wire format and lower case, compared and hashed as bytes.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct DnsName(Name<Vec<u8>>);

impl DnsName {
    /// Parses a name as nginx does: labels between dots, with an optional dot at the end. `None` if it is invalid.
    pub fn from_text(text: &[u8]) -> Option<DnsName> {
        let text = text.strip_suffix(b".").unwrap_or(text);
        let mut builder = NameBuilder::new_vec();
        for label in text.split(|&byte| byte == b'.') {
            // The library ignores an empty label.
            if label.is_empty() {
                return None;
            }
            builder.append_label(&label.to_ascii_lowercase()).ok()?;
        }
        builder.into_name().ok().map(DnsName)
    }

    /// Name for the reverse lookup of an address. (RFC 1035 §3.5, RFC 3596 §2.5)
    pub fn of_address(address: IpAddr) -> DnsName {
        DnsName(Name::reverse_from_addr(address).expect("the name of an address is short enough"))
    }

    fn of_parsed(name: &ParsedName<&[u8]>) -> DnsName {
        DnsName(name.to_canonical_name())
    }

    /// `true` for the root, which in an SRV record means that there is no service. (RFC 2782)
    pub fn is_root(&self) -> bool {
        self.0.is_root()
    }
}

impl fmt::Display for DnsName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Kind of a question.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Kind {
    A,
    Aaaa,
    Ptr,
    Srv,
}

impl Kind {
    fn rtype(self) -> Rtype {
        match self {
            Kind::A => Rtype::A,
            Kind::Aaaa => Rtype::AAAA,
            Kind::Ptr => Rtype::PTR,
            Kind::Srv => Rtype::SRV,
        }
    }
}

/// One question, with the ID that the response must have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question<'q> {
    pub id: u16,
    pub name: &'q DnsName,
    pub kind: Kind,
}

/// A server's answer to a question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Answer {
    pub content: Content,
    /// Time to live; for [`Content::Nothing`] and errors it comes from the zone's SOA record.
    pub ttl: Option<Duration>,
}

impl Answer {
    /// Answer for aliases that form a loop; asking again would give the same.
    fn of_broken_zone() -> Answer {
        Answer { content: Content::Error(ResolveError::NotFound), ttl: None }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Content {
    /// Addresses in the server's order.
    Addresses(Vec<IpAddr>),
    /// Another name, whose records are not in the answer.
    Alias(DnsName),
    Pointer(DnsName),
    Services(Vec<Service>),
    /// The name exists, but has no records of this kind.
    Nothing,
    Error(ResolveError),
    /// The answer was truncated; TCP is needed.
    Truncated,
}

/// Location of a service. (RFC 2782)
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Service {
    pub priority: u16,
    pub weight: u16,
    pub port: u16,
    pub target: DnsName,
}

/// Reason why bytes are not the answer to a question.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Offence {
    /// Shorter than a header.
    Short,
    /// Not a response to a query, or truncated where that is not allowed.
    Invalid {
        id: u16,
        flags: u16,
    },
    WrongId {
        found: u16,
        name: DnsName,
        expected: u16,
    },
    /// Another question, or none.
    Unexpected {
        name: DnsName,
    },
    /// The server did not understand the query, or the response code is unknown.
    Code {
        code: u8,
        id: u16,
    },
    /// The contents are malformed.
    Malformed,
}

/// nginx's words.
impl fmt::Display for Offence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Offence::Short => f.write_str("short DNS response"),
            Offence::Invalid { id, flags } => write!(f, "invalid DNS response {id} fl:{flags:04X}"),
            Offence::WrongId { found, name, expected } => {
                write!(f, "wrong ident {found} in DNS response for {name}, expect {expected}")
            }
            Offence::Unexpected { name } => write!(f, "unexpected DNS response for {name}"),
            Offence::Code { code: 1, id } => write!(f, "DNS error (1: Format error), query id:{id}"),
            Offence::Code { code, id } => write!(f, "DNS error ({code}: Unknown error), query id:{id}"),
            Offence::Malformed => f.write_str("invalid DNS response"),
        }
    }
}

impl Question<'_> {
    /// The query, with recursion desired.
    pub fn to_bytes(self) -> Vec<u8> {
        let target = Vec::with_capacity(QUERY_BYTES_MAX);
        let mut builder = MessageBuilder::from_target(target).expect("memory has room").question();
        builder.header_mut().set_id(self.id);
        builder.header_mut().set_rd(true);
        builder.push((&self.name.0, self.kind.rtype())).expect("memory has room");
        builder.finish()
    }

    /// Parses the answer to this question.
    pub fn read_answer(self, bytes: &[u8], is_tcp: bool) -> Result<Answer, Offence> {
        let message = Message::from_slice(bytes).map_err(|_| Offence::Short)?;
        let header = message.header();
        if header.id() != self.id {
            return Err(Offence::WrongId { found: header.id(), name: self.name.clone(), expected: self.id });
        }
        if !header.qr() || header.opcode() != Opcode::QUERY || header.tc() && is_tcp {
            let flags = u16::from_be_bytes([bytes[2], bytes[3]]);
            return Err(Offence::Invalid { id: self.id, flags });
        }
        let error = match header.rcode() {
            Rcode::NOERROR => None,
            Rcode::SERVFAIL => Some(ResolveError::ServerFailure),
            Rcode::NXDOMAIN => Some(ResolveError::NotFound),
            Rcode::NOTIMP => Some(ResolveError::Unimplemented),
            Rcode::REFUSED => Some(ResolveError::Refused),
            // As in nginx the query is then repeated.
            code => return Err(Offence::Code { code: code.to_int(), id: self.id }),
        };
        let is_ours = message.sole_question().is_ok_and(|question| {
            question.qname().name_eq(&self.name.0)
                && question.qtype() == self.kind.rtype()
                && question.qclass() == Class::IN
        });
        if !is_ours {
            return Err(Offence::Unexpected { name: self.name.clone() });
        }
        if header.tc() {
            return Ok(Answer { content: Content::Truncated, ttl: None });
        }
        if let Some(error) = error {
            return Ok(Answer { content: Content::Error(error), ttl: negative_ttl(message) });
        }
        self.read_records(message).ok_or(Offence::Malformed)
    }

    /// `None` if the message is malformed.
    fn read_records(self, message: &Message<[u8]>) -> Option<Answer> {
        let mut records: Vec<ParsedRecord<'_, [u8]>> = Vec::new();
        let mut aliases = Vec::new();
        for record in message.answer().ok()? {
            let record = record.ok()?;
            if record.class() != Class::IN {
                continue;
            }
            if record.rtype() == Rtype::CNAME {
                aliases.push(record.into_record::<Cname<ParsedName<&[u8]>>>().ok()??);
                if aliases.len() > ALIASES_MAX {
                    return Some(Answer::of_broken_zone());
                }
            } else if record.rtype() == self.kind.rtype() && records.len() < RECORDS_MAX {
                records.push(record);
            }
        }
        // Follows the aliases, whatever their order.
        let mut ttl = TTL_MAX;
        let mut names = vec![self.name.clone()];
        while let Some(alias) = aliases.iter().find(|alias| alias.owner().name_eq(&names[names.len() - 1].0)) {
            let target = DnsName::of_parsed(alias.data().cname());
            if target.is_root() || names.contains(&target) {
                return Some(Answer::of_broken_zone());
            }
            ttl = ttl.min(seconds(alias.ttl().as_secs()));
            names.push(target);
        }
        records.retain(|record| names.iter().any(|name| record.owner().name_eq(&name.0)));
        for record in &records {
            ttl = ttl.min(seconds(record.ttl().as_secs()));
        }
        let content = match self.kind {
            _ if records.is_empty() && names.len() > 1 => Content::Alias(names.pop()?),
            _ if records.is_empty() => return Some(Answer { content: Content::Nothing, ttl: negative_ttl(message) }),
            Kind::A => Content::Addresses(data(&records, |data: &A| IpAddr::V4(data.addr()))?),
            Kind::Aaaa => Content::Addresses(data(&records, |data: &Aaaa| IpAddr::V6(data.addr()))?),
            Kind::Ptr => {
                let names = data(&records, |data: &Ptr<ParsedName<&[u8]>>| DnsName::of_parsed(data.ptrdname()))?;
                Content::Pointer(names.into_iter().next()?)
            }
            Kind::Srv => Content::Services(data(&records, |data: &Srv<ParsedName<&[u8]>>| Service {
                priority: data.priority(),
                weight: data.weight(),
                port: data.port(),
                target: DnsName::of_parsed(data.target()),
            })?),
        };
        Some(Answer { content, ttl: Some(Duration::from_secs(ttl.into())) })
    }
}

/// Converts the data of each record; `None` if one is malformed.
fn data<'a, D, T>(records: &[ParsedRecord<'a, [u8]>], make: impl Fn(&D) -> T) -> Option<Vec<T>>
where
    D: domain::base::rdata::ParseRecordData<'a, [u8]>,
{
    records.iter().map(|record| Some(make(record.to_record::<D>().ok()??.data()))).collect()
}

/// Effective time to live. (RFC 2181 §8)
fn seconds(ttl: u32) -> u32 {
    if ttl > i32::MAX as u32 { 0 } else { ttl.min(TTL_MAX) }
}

/// Time to live of a negative answer; `None` without an SOA record. (RFC 2308 §5)
fn negative_ttl(message: &Message<[u8]>) -> Option<Duration> {
    let mut authority = message.authority().ok()?.limit_to_in::<Soa<ParsedName<&[u8]>>>();
    let record = authority.next()?.ok()?;
    let ttl = seconds(record.ttl().as_secs()).min(seconds(record.data().minimum().as_secs()));
    Some(Duration::from_secs(ttl.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(text: &str) -> Name<Vec<u8>> {
        text.parse().unwrap()
    }

    /// A response to `question` with an alias, two addresses, and a record of the zone.
    fn answer(question: Question<'_>) -> Vec<u8> {
        let query = question.to_bytes();
        let query = Message::from_octets(&query[..]).unwrap();
        let mut answer = MessageBuilder::new_vec().start_answer(&query, Rcode::NOERROR).unwrap();
        let a = |last| A::new([192, 0, 2, last].into());
        answer.push((name("a.example"), 60, Cname::new(name("b.example")))).unwrap();
        answer.push((name("b.example"), 50, a(1))).unwrap();
        answer.push((name("B.Example"), 0x8000_0000, a(2))).unwrap();
        answer.push((name("c.example"), 10, a(3))).unwrap();
        answer.finish()
    }

    #[test]
    fn a_query_is_written_as_rfc_1035_has_it() {
        let name = DnsName::from_text(b"A.Example.").unwrap();
        let query = Question { id: 0x1234, name: &name, kind: Kind::Aaaa }.to_bytes();
        assert_eq!(query, b"\x12\x34\x01\0\0\x01\0\0\0\0\0\0\x01a\x07example\0\0\x1c\0\x01");
        assert!(query.len() <= QUERY_BYTES_MAX);
    }

    #[test]
    fn records_behind_the_aliases_are_taken_for_the_shortest_time_to_live() {
        let name = DnsName::from_text(b"a.example").unwrap();
        let question = Question { id: 7, name: &name, kind: Kind::A };
        let read = question.read_answer(&answer(question), false).unwrap();
        let addresses = [[192, 0, 2, 1], [192, 0, 2, 2]].map(IpAddr::from).to_vec();
        // A time to live of more than 31 bits counts as zero.
        assert_eq!(read, Answer { content: Content::Addresses(addresses), ttl: Some(Duration::ZERO) });
    }

    #[test]
    fn any_bytes_are_read_or_refused() {
        let name = DnsName::from_text(b"a.example").unwrap();
        for kind in [Kind::A, Kind::Srv, Kind::Ptr] {
            let question = Question { id: 7, name: &name, kind };
            let good = answer(question);
            for length in 0..good.len() {
                assert!(question.read_answer(&good[..length], false).is_err(), "{length} bytes");
            }
            for place in 0..good.len() {
                for value in 0..=255 {
                    let mut bytes = good.clone();
                    bytes[place] = value;
                    // Over UDP or TCP.
                    let _ = question.read_answer(&bytes, value % 2 == 0);
                }
            }
        }
    }

    #[test]
    fn offences_have_nginx_s_words() {
        let name = DnsName::from_text(b"a.example").unwrap();
        let question = Question { id: 7, name: &name, kind: Kind::A };
        let refused = |change: &dyn Fn(&mut Vec<u8>), is_tcp| {
            let mut bytes = answer(question);
            change(&mut bytes);
            question.read_answer(&bytes, is_tcp).unwrap_err().to_string()
        };
        let cases = [
            (refused(&|bytes| bytes.truncate(11), false), "short DNS response"),
            (refused(&|bytes| bytes[1] = 8, false), "wrong ident 8 in DNS response for a.example, expect 7"),
            (refused(&|bytes| bytes[2] = 1, false), "invalid DNS response 7 fl:0100"),
            (refused(&|bytes| bytes[2] |= 2, true), "invalid DNS response 7 fl:8300"),
            (refused(&|bytes| bytes[3] |= 1, false), "DNS error (1: Format error), query id:7"),
            (refused(&|bytes| bytes[3] |= 9, false), "DNS error (9: Unknown error), query id:7"),
            (refused(&|bytes| bytes[13] = b'x', false), "unexpected DNS response for a.example"),
            (refused(&|bytes| bytes.truncate(60), false), "invalid DNS response"),
        ];
        for (found, expected) in cases {
            assert_eq!(found, expected);
        }
    }
}
