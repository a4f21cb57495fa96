//! A connection's socket, watched to notice that the client has closed it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf, join};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;
use tokio::time::sleep;

/// Time between checks of a socket that has unread bytes.
const CHECK: Duration = Duration::from_millis(500);

/// Watches whether the client has closed the connection. hyper does so by reading, and does not
/// read while it has bytes of the next request.
#[derive(Clone)]
pub(crate) struct Watch(Arc<OwnedReadHalf>);

impl Watch {
    /// Waits until the client has closed the connection, or its sending half.
    pub async fn closed(&self) {
        // Ready at once if there are unread bytes.
        while self.0.ready(Interest::READABLE).await.is_ok_and(|ready| !ready.is_read_closed()) {
            sleep(CHECK).await;
        }
    }
}

/// The stream, and what watches it.
pub(crate) fn watched(stream: TcpStream) -> (impl AsyncRead + AsyncWrite, Watch) {
    let (read, write) = stream.into_split();
    let watch = Watch(Arc::new(read));
    (join(Reader(watch.clone()), write), watch)
}

/// The reading half.
struct Reader(Watch);

impl AsyncRead for Reader {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let stream: &TcpStream = self.0.0.as_ref().as_ref();
        loop {
            ready!(stream.poll_read_ready(context))?;
            match stream.try_read(buffer.initialize_unfilled()) {
                Ok(length) => {
                    buffer.advance(length);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}
