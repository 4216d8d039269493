//! Lossless encoding in JSON of byte strings that may not be UTF-8 (paths, environment): a string if they are,
//! otherwise an array of numbers.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use serde::{Deserialize, Deserializer, Serialize, Serializer};

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Encoded {
    Text(String),
    Bytes(Vec<u8>),
}

impl Encoded {
    fn new(bytes: &[u8]) -> Encoded {
        match std::str::from_utf8(bytes) {
            Ok(text) => Encoded::Text(text.to_owned()),
            Err(_) => Encoded::Bytes(bytes.to_vec()),
        }
    }

    fn into_os_string(self) -> OsString {
        match self {
            Encoded::Text(text) => text.into(),
            Encoded::Bytes(bytes) => OsString::from_vec(bytes),
        }
    }
}

pub mod path {
    use super::*;
    use std::path::{Path, PathBuf};

    pub fn serialize<S: Serializer>(path: &Path, serializer: S) -> Result<S::Ok, S::Error> {
        Encoded::new(path.as_os_str().as_bytes()).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PathBuf, D::Error> {
        Ok(Encoded::deserialize(deserializer)?.into_os_string().into())
    }
}

pub mod optional_path {
    use super::*;
    use std::path::PathBuf;

    pub fn serialize<S: Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
        path.as_ref().map(|path| Encoded::new(path.as_os_str().as_bytes())).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<PathBuf>, D::Error> {
        Ok(Option::<Encoded>::deserialize(deserializer)?.map(|encoded| encoded.into_os_string().into()))
    }
}

pub mod os_string {
    use super::*;
    use std::ffi::OsStr;

    pub fn serialize<S: Serializer>(text: &OsStr, serializer: S) -> Result<S::Ok, S::Error> {
        Encoded::new(text.as_bytes()).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<OsString, D::Error> {
        Ok(Encoded::deserialize(deserializer)?.into_os_string())
    }
}

pub mod optional_os_string {
    use super::*;

    pub fn serialize<S: Serializer>(text: &Option<OsString>, serializer: S) -> Result<S::Ok, S::Error> {
        text.as_ref().map(|text| Encoded::new(text.as_bytes())).serialize(serializer)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<OsString>, D::Error> {
        Ok(Option::<Encoded>::deserialize(deserializer)?.map(Encoded::into_os_string))
    }
}
