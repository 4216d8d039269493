//! Writes databases of addresses (MaxMind DB File Format Specification 2.0), as small as a test needs them.
//! (<https://maxmind.github.io/MaxMind-DB/>)
//!
//! ```text
//!   search tree │ 16 zeros │ data │ "\xab\xcd\xefMaxMind.com" │ metadata
//! ```

use std::net::IpAddr;

/// A value of a record.
#[derive(Clone, Debug)]
pub enum Value {
    Text(&'static str),
    Double(f64),
    Short(u16),
    Number(u32),
    Long(u64),
    Map(Vec<(&'static str, Value)>),
    Array(Vec<Value>),
}

/// A map with these rows.
pub fn map<const N: usize>(rows: [(&'static str, Value); N]) -> Value {
    Value::Map(rows.into())
}

/// Names as databases have them: `{ names: { en: … } }`.
pub fn named(name: &'static str) -> (&'static str, Value) {
    ("names", map([("de", Value::Text("not this one")), ("en", Value::Text(name))]))
}

/// A database under construction.
pub struct Mmdb {
    kind: &'static str,
    is_v6: bool,
    record_bits: u8,
    nodes: Vec<[Branch; 2]>,
    data: Vec<u8>,
}

/// Target of one bit in the search tree.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Branch {
    Nowhere,
    Node(usize),
    /// Offset of a record.
    Data(usize),
}

impl Mmdb {
    /// A database of this type for IPv6, which contains IPv4 addresses.
    pub fn new(kind: &'static str) -> Mmdb {
        Mmdb { kind, is_v6: true, record_bits: 24, nodes: vec![[Branch::Nowhere; 2]], data: Vec::new() }
    }

    /// Restricts it to IPv4 addresses. Called before the first network.
    pub fn v4_alone(mut self) -> Mmdb {
        self.is_v6 = false;
        self
    }

    /// Sets the size of half a node: 24, 28 or 32 bits.
    pub fn record_bits(mut self, bits: u8) -> Mmdb {
        self.record_bits = bits;
        self
    }

    /// Adds a network such as `192.0.2.0/24`. A network within another one is added after it.
    pub fn network(mut self, network: &str, record: &Value) -> Mmdb {
        let offset = self.data.len();
        encode(&mut self.data, record);
        self.insert(network, offset);
        self
    }

    /// Adds a network whose record consists of these bytes, valid or not.
    pub fn broken_network(mut self, network: &str, bytes: &[u8]) -> Mmdb {
        let offset = self.data.len();
        self.data.extend_from_slice(bytes);
        self.insert(network, offset);
        self
    }

    /// Adds a network whose record lies after the end of the data.
    pub fn network_without_record(mut self, network: &str) -> Mmdb {
        self.insert(network, 1 << 20);
        self
    }

    fn insert(&mut self, network: &str, offset: usize) {
        let (address, length) = network.split_once('/').expect("a network");
        let length: usize = length.parse().expect("a length");
        let (bits, length) = match address.parse().expect("an address") {
            IpAddr::V4(address) if self.is_v6 => (u128::from(address.to_bits()), length + 96),
            IpAddr::V4(address) => (u128::from(address.to_bits()) << 96, length),
            IpAddr::V6(address) => (address.to_bits(), length),
        };
        let mut node = 0;
        for depth in 0..length {
            let bit = usize::from(bits >> (127 - depth) & 1 == 1);
            if depth + 1 == length {
                self.nodes[node][bit] = Branch::Data(offset);
                return;
            }
            node = match self.nodes[node][bit] {
                Branch::Node(next) => next,
                // The value of the whole network goes to both halves.
                around => {
                    self.nodes.push([around; 2]);
                    self.nodes[node][bit] = Branch::Node(self.nodes.len() - 1);
                    self.nodes.len() - 1
                }
            };
        }
        panic!("a network of no length");
    }

    /// The complete file.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for node in &self.nodes {
            let [left, right] = node.map(|branch| match branch {
                Branch::Nowhere => self.nodes.len() as u32,
                Branch::Node(index) => index as u32,
                Branch::Data(offset) => (self.nodes.len() + 16 + offset) as u32,
            });
            let [[left_top, left @ ..], [right_top, right @ ..]] = [left.to_be_bytes(), right.to_be_bytes()];
            match self.record_bits {
                24 => bytes.extend([left, right].concat()),
                28 => bytes.extend([&left[..], &[left_top << 4 | right_top], &right].concat()),
                32 => bytes.extend([&[left_top][..], &left, &[right_top], &right].concat()),
                bits => panic!("no such length: {bits}"),
            }
        }
        bytes.extend([0; 16]);
        bytes.extend_from_slice(&self.data);
        bytes.extend_from_slice(b"\xab\xcd\xefMaxMind.com");
        encode(
            &mut bytes,
            &map([
                ("binary_format_major_version", Value::Short(2)),
                ("binary_format_minor_version", Value::Short(0)),
                ("build_epoch", Value::Long(1_700_000_000)),
                ("database_type", Value::Text(self.kind)),
                ("description", map([("en", Value::Text("of a test"))])),
                ("ip_version", Value::Short(if self.is_v6 { 6 } else { 4 })),
                ("languages", Value::Array(vec![Value::Text("en")])),
                ("node_count", Value::Number(self.nodes.len() as u32)),
                ("record_size", Value::Short(self.record_bits.into())),
            ]),
        );
        bytes
    }
}

fn encode(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Text(text) => {
            head(out, 2, text.len());
            out.extend_from_slice(text.as_bytes());
        }
        Value::Double(number) => {
            head(out, 3, 8);
            out.extend(number.to_be_bytes());
        }
        Value::Short(number) => {
            head(out, 5, 2);
            out.extend(number.to_be_bytes());
        }
        Value::Number(number) => {
            head(out, 6, 4);
            out.extend(number.to_be_bytes());
        }
        Value::Long(number) => {
            head(out, 9, 8);
            out.extend(number.to_be_bytes());
        }
        Value::Map(rows) => {
            head(out, 7, rows.len());
            for (name, value) in rows {
                encode(out, &Value::Text(name));
                encode(out, value);
            }
        }
        Value::Array(values) => {
            head(out, 11, values.len());
            values.iter().for_each(|value| encode(out, value));
        }
    }
}

/// Type, in a second byte for extended types, and length.
fn head(out: &mut Vec<u8>, kind: u8, length: usize) {
    let (short, rest) = match length {
        0..29 => (length as u8, None),
        29..285 => (29, Some((length - 29) as u8)),
        _ => panic!("too long for a test"),
    };
    match kind {
        1..=7 => out.push(kind << 5 | short),
        _ => out.extend([short, kind - 7]),
    }
    out.extend(rest);
}
