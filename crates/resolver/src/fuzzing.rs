//! Body of the fuzz target `dns_answer`, which sees what is private; the program does not call it.

use std::time::Duration;

use super::message::{Content, DnsName, Kind, Question, TTL_MAX};

/// Parses bytes as a server's answer: once as they are, and once after the head of a matching answer, with as many
/// records as the first byte says.
pub fn read_answer(kind: u8, is_tcp: bool, bytes: &[u8]) {
    let kind = [Kind::A, Kind::Aaaa, Kind::Ptr, Kind::Srv][usize::from(kind % 4)];
    let name = DnsName::from_text(b"www.example.com").expect("a name");
    let question = Question { id: 0x1234, name: &name, kind };
    let mut answer = question.to_bytes();
    if let Some((&count, records)) = bytes.split_first() {
        answer[2] |= 0x80;
        answer[7] = count;
        answer.extend_from_slice(records);
    }
    for bytes in [bytes, &answer] {
        let Ok(answer) = question.read_answer(bytes, is_tcp) else { continue };
        assert!(answer.ttl.is_none_or(|ttl| ttl <= Duration::from_secs(TTL_MAX.into())));
        if let Content::Addresses(addresses) = &answer.content {
            assert!(!addresses.is_empty() && addresses.iter().all(|address| address.is_ipv4() == (kind == Kind::A)));
        }
    }
}
