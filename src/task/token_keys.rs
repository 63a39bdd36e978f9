//! Looking now and then whether the keys of tokens were replaced, so that they can be without a restart.

use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use crate::auth::token::Tokens;
use crate::blocking;

/// Time between looks at the files.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// Reads the key files again for as long as the member runs; ends at once if tokens have none.
pub async fn run(tokens: Arc<Tokens>) {
    if !matches!(*tokens, Tokens::Jwt(_)) {
        return;
    }
    let mut failed = String::new();
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let looked = Arc::clone(&tokens);
        let Ok(reloaded) = blocking::spawn(move || looked.reload()).await else { return };
        match reloaded {
            Ok(true) => info!("the key of tokens was replaced"),
            Ok(false) => failed.clear(),
            Err(error) if error == failed => {}
            Err(error) => {
                warn!(error, "the key of tokens cannot be read again; the one that was read is used on");
                failed = error;
            }
        }
    }
}
