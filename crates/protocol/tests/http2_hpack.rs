//! HPACK: the examples of RFC 7541, every fault, and round trips.

use gale_protocol::http2::hpack::{Decoder, Encoder, HpackFault, Indexing, NameKind};
use gale_protocol::response::ResponseField;
use proptest::prelude::*;

type List = Vec<(Vec<u8>, Vec<u8>)>;

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> =
        text.bytes().filter_map(|byte| (byte as char).to_digit(16)).map(|digit| digit as u8).collect();
    digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
}

fn decode(decoder: &mut Decoder, block: &[u8]) -> Result<List, HpackFault> {
    let (mut at, mut text, mut list) = (0, Vec::new(), List::new());
    decoder.begin_block();
    while let Some(field) = decoder.next_field(block, &mut at, &mut text)? {
        assert!(at <= block.len());
        list.push((field.name.of(&text).to_vec(), field.value.of(&text).to_vec()));
    }
    assert_eq!(at, block.len());
    Ok(list)
}

/// Decodes blocks in hexadecimal and checks the fields and the size of the table after each.
fn check_examples(mut decoder: Decoder, examples: &[(&str, &str, usize)]) {
    for (block, expected, table_size) in examples {
        let list = decode(&mut decoder, &hex(block)).unwrap();
        let fields = list
            .iter()
            .map(|(name, value)| format!("{}: {}\n", String::from_utf8_lossy(name), String::from_utf8_lossy(value)));
        assert_eq!(fields.collect::<String>(), *expected);
        assert_eq!(decoder.table_size(), *table_size);
    }
}

#[test]
fn rfc_7541_c_2_single_fields() {
    check_examples(
        Decoder::default(),
        &[("400a 6375 7374 6f6d 2d6b 6579 0d63 7573 746f 6d2d 6865 6164 6572", "custom-key: custom-header\n", 55)],
    );
    check_examples(Decoder::default(), &[("040c 2f73 616d 706c 652f 7061 7468", ":path: /sample/path\n", 0)]);
    check_examples(Decoder::default(), &[("1008 7061 7373 776f 7264 0673 6563 7265 74", "password: secret\n", 0)]);
    check_examples(Decoder::default(), &[("82", ":method: GET\n", 0)]);
    let (mut text, mut at) = (Vec::new(), 0);
    let block = hex("1008 7061 7373 776f 7264 0673 6563 7265 74");
    let field = Decoder::default().next_field(&block, &mut at, &mut text).unwrap().unwrap();
    assert!(field.is_never_indexed);
}

const REQUESTS: [&str; 3] = [
    ":method: GET\n:scheme: http\n:path: /\n:authority: www.example.com\n",
    ":method: GET\n:scheme: http\n:path: /\n:authority: www.example.com\ncache-control: no-cache\n",
    ":method: GET\n:scheme: https\n:path: /index.html\n:authority: www.example.com\ncustom-key: custom-value\n",
];

#[test]
fn rfc_7541_c_3_requests_without_huffman() {
    check_examples(
        Decoder::default(),
        &[
            ("8286 8441 0f77 7777 2e65 7861 6d70 6c65 2e63 6f6d", REQUESTS[0], 57),
            ("8286 84be 5808 6e6f 2d63 6163 6865", REQUESTS[1], 110),
            ("8287 85bf 400a 6375 7374 6f6d 2d6b 6579 0c63 7573 746f 6d2d 7661 6c75 65", REQUESTS[2], 164),
        ],
    );
}

#[test]
fn rfc_7541_c_4_requests_with_huffman() {
    check_examples(
        Decoder::default(),
        &[
            ("8286 8441 8cf1 e3c2 e5f2 3a6b a0ab 90f4 ff", REQUESTS[0], 57),
            ("8286 84be 5886 a8eb 1064 9cbf", REQUESTS[1], 110),
            ("8287 85bf 4088 25a8 49e9 5ba9 7d7f 8925 a849 e95b b8e8 b4bf", REQUESTS[2], 164),
        ],
    );
}

const RESPONSES: [&str; 3] = [
    ":status: 302\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:21 GMT\nlocation: https://www.example.com\n",
    ":status: 307\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:21 GMT\nlocation: https://www.example.com\n",
    ":status: 200\ncache-control: private\ndate: Mon, 21 Oct 2013 20:13:22 GMT\nlocation: https://www.example.com\n\
     content-encoding: gzip\nset-cookie: foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1\n",
];

/// A decoder with a table of 256 bytes, as the examples require.
fn small_decoder() -> Decoder {
    let mut decoder = Decoder::new(256);
    decoder.handle_size_acknowledged(256);
    assert_eq!(decode(&mut decoder, &hex("3fe1 01")), Ok(vec![]));
    decoder
}

#[test]
fn rfc_7541_c_5_responses_without_huffman() {
    check_examples(
        small_decoder(),
        &[
            (
                "4803 3330 3258 0770 7269 7661 7465 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 3a32 \
                 3120 474d 546e 1768 7474 7073 3a2f 2f77 7777 2e65 7861 6d70 6c65 2e63 6f6d",
                RESPONSES[0],
                222,
            ),
            ("4803 3330 37c1 c0bf", RESPONSES[1], 222),
            (
                "88c1 611d 4d6f 6e2c 2032 3120 4f63 7420 3230 3133 2032 303a 3133 3a32 3220 474d 54c0 5a04 677a 6970 \
                 7738 666f 6f3d 4153 444a 4b48 514b 425a 584f 5157 454f 5049 5541 5851 5745 4f49 553b 206d 6178 2d61 \
                 6765 3d33 3630 303b 2076 6572 7369 6f6e 3d31",
                RESPONSES[2],
                215,
            ),
        ],
    );
}

#[test]
fn rfc_7541_c_6_responses_with_huffman() {
    check_examples(
        small_decoder(),
        &[
            (
                "4882 6402 5885 aec3 771a 4b61 96d0 7abe 9410 54d4 44a8 2005 9504 0b81 66e0 82a6 2d1b ff6e 919d 29ad \
                 1718 63c7 8f0b 97c8 e9ae 82ae 43d3",
                RESPONSES[0],
                222,
            ),
            ("4883 640e ffc1 c0bf", RESPONSES[1], 222),
            (
                "88c1 6196 d07a be94 1054 d444 a820 0595 040b 8166 e084 a62d 1bff c05a 839b d9ab 77ad 94e7 821d d7f2 \
                 e6c7 b335 dfdf cd5b 3960 d5af 2708 7f36 72c1 ab27 0fb5 291f 9587 3160 65c0 03ed 4ee5 b106 3d50 07",
                RESPONSES[2],
                215,
            ),
        ],
    );
}

#[test]
fn faults_are_named() {
    for (block, fault) in [
        ("80", HpackFault::InvalidIndex(0)),
        ("be", HpackFault::InvalidIndex(62)),
        ("ff80 8080 8001", HpackFault::IntegerTooLong),
        ("7f", HpackFault::Truncated),
        ("40", HpackFault::Truncated),
        ("4001 61", HpackFault::Truncated),
        ("4001 6103 6262", HpackFault::Truncated),
        ("407f ffff ff7f 61", HpackFault::Truncated),
        ("0082 ffff 00", HpackFault::InvalidHuffman),
        ("8220", HpackFault::MisplacedSizeUpdate),
        ("2020 20", HpackFault::MisplacedSizeUpdate),
        ("3fe2 1f", HpackFault::SizeUpdateTooLarge(4097)),
        ("0f80 8080 8080 01", HpackFault::IntegerTooLong),
    ] {
        assert_eq!(decode(&mut Decoder::default(), &hex(block)), Err(fault), "{block}");
    }
    assert_eq!(decode(&mut Decoder::default(), &hex("20 3fe1 1f 82")).unwrap().len(), 1);
}

#[test]
fn a_smaller_table_must_be_signalled() {
    let mut decoder = Decoder::new(100);
    assert!(decode(&mut decoder, &hex("82")).is_ok(), "before the acknowledgement");
    decoder.handle_size_acknowledged(100);
    assert_eq!(decode(&mut decoder.clone(), &hex("82")), Err(HpackFault::MissingSizeUpdate));
    assert_eq!(decode(&mut decoder.clone(), &hex("3f46 82")), Err(HpackFault::SizeUpdateTooLarge(101)));
    assert!(decode(&mut decoder, &hex("3f45 82")).is_ok());
}

#[test]
fn names_and_values_are_classified() {
    let kind = |name: &[u8], value: &[u8]| {
        let mut block = vec![0x40, name.len() as u8];
        block.extend_from_slice(name);
        block.push(value.len() as u8);
        block.extend_from_slice(value);
        block.push(0x80 | 62); // and from the table
        let (mut decoder, mut at, mut text) = (Decoder::default(), 0, Vec::new());
        let mut next = || decoder.next_field(&block, &mut at, &mut text).unwrap().unwrap();
        let (literal, indexed) = (next(), next());
        assert_eq!((literal.name_kind, literal.is_valid_value), (indexed.name_kind, indexed.is_valid_value));
        (literal.name_kind, literal.is_valid_value)
    };
    for (name, expected) in [
        (&b"x-a1"[..], NameKind::Plain),
        (b"x_a", NameKind::Token),
        (b"x^~", NameKind::Token),
        (b":x", NameKind::Pseudo),
        (b":", NameKind::Invalid),
        (b":X", NameKind::Invalid),
        (b"a:", NameKind::Invalid),
        (b"xY", NameKind::Invalid),
        (b"x ", NameKind::Invalid),
        (b"x\n", NameKind::Invalid),
        (b"x\xe9", NameKind::Invalid),
        (b"", NameKind::Invalid),
    ] {
        assert_eq!(kind(name, b"a").0, expected, "{name:?}");
    }
    for (value, is_valid) in [
        (&b""[..], true),
        (b"a \t\xe9b", true),
        (b" a", false),
        (b"a\t", false),
        (b"a\0b", false),
        (b"a\rb", false),
        (b"a\nb", false),
        (b"a\x01b", false),
        (b"a\x7fb", false),
    ] {
        assert_eq!(kind(b"a", value).1, is_valid, "{value:?}");
    }
}

#[test]
fn a_response_that_repeats_is_a_few_bytes() {
    let (mut encoder, mut decoder) = (Encoder::default(), Decoder::default());
    let response = |encoder: &mut Encoder| {
        let mut out = Vec::new();
        encoder.begin_block(&mut out);
        encoder.encode_status(200, &mut out);
        for (field, value) in [
            (ResponseField::Server, "gale"),
            (ResponseField::Date, "Mon, 21 Oct 2013 20:13:21 GMT"),
            (ResponseField::ContentType, "text/html"),
            (ResponseField::ContentLength, "612"),
            (ResponseField::LastModified, "Mon, 21 Oct 2013 20:13:21 GMT"),
            (ResponseField::ETag, "\"52658a91-264\""),
            (ResponseField::AcceptRanges, "bytes"),
        ] {
            encoder.encode_known(field, value.as_bytes(), &mut out);
        }
        out
    };
    let blocks: Vec<_> = (0..4).map(|_| response(&mut encoder)).collect();
    let lists: Vec<_> = blocks.iter().map(|block| decode(&mut decoder, block).unwrap()).collect();
    assert!(lists.windows(2).all(|pair| pair[0] == pair[1]) && lists[0].len() == 8);
    assert_eq!(blocks[3].len(), 8);
    assert_eq!(encoder.table_size(), decoder.table_size());
}

#[test]
fn secrets_are_never_indexed() {
    let (mut encoder, mut out) = (Encoder::default(), Vec::new());
    for _ in 0..3 {
        encoder.encode_known(ResponseField::SetCookie, b"a=b", &mut out);
        encoder.encode(b"Authorization", b"x", Indexing::of_request(b"authorization"), &mut out);
    }
    assert_eq!(encoder.table_size(), 0);
    let (mut decoder, mut at, mut text) = (Decoder::default(), 0, Vec::new());
    while let Some(field) = decoder.next_field(&out, &mut at, &mut text).unwrap() {
        assert!(field.is_never_indexed);
    }
}

#[test]
fn a_peer_without_a_table_gets_literals() {
    let (mut encoder, mut decoder) = (Encoder::default(), Decoder::new(0));
    let mut out = Vec::new();
    encoder.encode_known(ResponseField::Server, b"gale", &mut out);
    decode(&mut decoder, &out).unwrap();
    decoder.handle_size_acknowledged(0);
    encoder.handle_size_allowed(0);
    for _ in 0..3 {
        out.clear();
        encoder.begin_block(&mut out);
        encoder.encode_known(ResponseField::Server, b"gale", &mut out);
        decode(&mut decoder, &out).unwrap();
        assert_eq!((encoder.table_size(), decoder.table_size()), (0, 0));
    }
}

fn any_indexing() -> impl Strategy<Value = Indexing> {
    prop::sample::select(vec![Indexing::Always, Indexing::IfRepeated, Indexing::Not, Indexing::Never])
}

fn any_name() -> impl Strategy<Value = Vec<u8>> {
    let known: Vec<Vec<u8>> = ["server", "date", "etag", "x-a", "x^", "x~", "accept-encoding", "set-cookie"]
        .map(|name| name.as_bytes().to_vec())
        .to_vec();
    prop_oneof![prop::sample::select(known), prop::collection::vec(any::<u8>(), 0..80)]
}

proptest! {
    #[test]
    fn encoded_fields_are_decoded(
        blocks in prop::collection::vec(
            (
                prop::option::of(0..6000u32),
                prop::collection::vec(
                    (any_name(), prop::collection::vec(any::<u8>(), 0..200), any_indexing(), any::<bool>()),
                    0..12,
                ),
            ),
            0..12,
        ),
        wanted in 0..6000u32,
    ) {
        let (mut encoder, mut decoder) = (Encoder::new(wanted), Decoder::new(6000));
        let mut fields: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for (size, block) in blocks {
            if let Some(size) = size {
                decoder.handle_size_acknowledged(size);
                encoder.handle_size_allowed(size);
            }
            let mut out = Vec::new();
            let mut expected = List::new();
            encoder.begin_block(&mut out);
            for (name, value, indexing, repeat) in block {
                let (name, value) = match (repeat, fields.last()) {
                    (true, Some(last)) => last.clone(),
                    _ => (name, value),
                };
                encoder.encode(&name, &value, indexing, &mut out);
                expected.push((name.to_ascii_lowercase(), value.clone()));
                fields.push((name, value));
            }
            prop_assert_eq!(decode(&mut decoder, &out).unwrap(), expected);
            prop_assert_eq!(encoder.table_size(), decoder.table_size());
        }
    }

    #[test]
    fn any_bytes_are_decoded_or_refused(
        blocks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..5)
    ) {
        let mut decoder = Decoder::default();
        for block in blocks {
            if decode(&mut decoder, &block).is_err() {
                break;
            }
            prop_assert!(decoder.table_size() <= 4096);
        }
    }
}
