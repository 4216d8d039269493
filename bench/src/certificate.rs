//! certificate: a self-signed certificate with a P-256 key, in the files that servers need.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The files, in a folder of their own that is removed on drop.
#[derive(Debug)]
pub struct Certificate {
    directory: PathBuf,
    paths: [PathBuf; 3],
}

impl Certificate {
    pub fn make(names: &[String]) -> Result<Arc<Certificate>, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("gale-bench-{}-tls-{number}", std::process::id()));
        let (chain, key) = texts(names)?;
        let paths = ["chain.pem", "key.pem", "both.pem"].map(|name| directory.join(name));
        let write = || {
            fs::create_dir(&directory)?;
            fs::write(&paths[0], &chain)?;
            fs::write(&paths[1], &key)?;
            fs::write(&paths[2], chain.clone() + &key)
        };
        write().map_err(|error| format!("{}: {error}", directory.display()))?;
        Ok(Arc::new(Certificate { directory, paths }))
    }

    pub fn chain(&self) -> &Path {
        &self.paths[0]
    }

    pub fn key(&self) -> &Path {
        &self.paths[1]
    }

    /// Path of the file with both, for haproxy.
    pub fn both(&self) -> &Path {
        &self.paths[2]
    }
}

impl Drop for Certificate {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.directory);
    }
}

/// Returns a certificate and its key in PEM.
pub fn texts(names: &[String]) -> Result<(String, String), String> {
    let made = rcgen::generate_simple_self_signed(names).map_err(|error| format!("certificate: {error}"))?;
    Ok((made.cert.pem(), made.signing_key.serialize_pem()))
}
