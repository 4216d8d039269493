//! HPACK: a block is decoded or refused within the limits, and decoded fields survive a round trip.

use gale_protocol::http2::hpack::{Decoder, Encoder, Indexing};

/// Runs the target on one input.
pub fn run(data: &[u8]) {
    // The first byte selects the table sizes. Blocks follow, each after its length.
    let Some((&choice, mut rest)) = data.split_first() else { return };
    let size = u32::from(choice) * 40;
    let (mut decoder, mut mirror, mut encoder) = (Decoder::new(size), Decoder::new(size), Encoder::new(size));
    if choice & 1 == 1 {
        decoder.handle_size_acknowledged(size);
    }
    encoder.handle_size_allowed(size);
    while let Some((&length, behind)) = rest.split_first() {
        let (block, next) = behind.split_at(behind.len().min(usize::from(length) * 4));
        rest = next;
        let (mut at, mut text, mut fields) = (0, Vec::new(), Vec::new());
        decoder.begin_block();
        loop {
            let before = (at, text.len());
            match decoder.next_field(block, &mut at, &mut text) {
                Ok(Some(field)) => {
                    assert!(at > before.0 && at <= block.len());
                    assert!(text.len() - before.1 <= 8192.max(block.len() * 2) + 2);
                    assert_eq!(text.len() - before.1, field.name.len() + field.value.len() + 2);
                    fields.push((field.name.of(&text).to_vec(), field.value.of(&text).to_vec(), field.is_valid_value));
                }
                Ok(None) => break,
                Err(fault) => {
                    assert!(!fault.to_string().is_empty());
                    return;
                }
            }
        }
        assert!(decoder.table_size() <= size.max(4096) as usize);
        check_round_trip(&mut encoder, &mut mirror, &fields, choice);
    }
}

fn check_round_trip(encoder: &mut Encoder, mirror: &mut Decoder, fields: &[(Vec<u8>, Vec<u8>, bool)], choice: u8) {
    const INDEXING: [Indexing; 4] = [Indexing::Always, Indexing::IfRepeated, Indexing::Not, Indexing::Never];
    let mut out = Vec::new();
    encoder.begin_block(&mut out);
    for (number, (name, value, _)) in fields.iter().enumerate() {
        encoder.encode(name, value, INDEXING[(number + usize::from(choice)) % 4], &mut out);
    }
    let (mut at, mut text) = (0, Vec::new());
    mirror.begin_block();
    for (name, value, is_valid) in fields {
        let field = mirror.next_field(&out, &mut at, &mut text).unwrap().unwrap();
        assert_eq!(field.name.of(&text), name.to_ascii_lowercase());
        assert_eq!(field.value.of(&text), value);
        assert_eq!(field.is_valid_value, *is_valid);
    }
    assert!(mirror.next_field(&out, &mut at, &mut text).unwrap().is_none());
    assert_eq!(mirror.table_size(), encoder.table_size());
}
